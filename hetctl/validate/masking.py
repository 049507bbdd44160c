"""Placeholders for what identifies machines and people: host-1, ip-3. The same value gets the same one in every file.

`hetctl discover --capture` masks so that discovery still works on what is left; a report is only read, so here
nothing of the original shape is kept. Whatever is known to identify is replaced wherever it stands; patterns find
what nobody named. Names that say nothing (root, localhost) stay.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from hetctl.probe.masking import GUID, HEX32, HOME, IPV4, IPV6, MAC, NOT_SERIAL, SERIAL_PLACES, UUID

COMMON = frozenset(("root", "localhost", "ubuntu", "debian", "rocky", "ec2-user", "user", "admin", "none", "unknown"))
SECRET_NAME = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASS(?!E|I)|CRED|AUTH(?!OR)", re.IGNORECASE)
_LEAST_SECRET = 6  # shorter values are words like `yes`, and would be replaced everywhere

_LEAST_IDENTITY = 10**9  # smaller numbers are figures
_UNMISTAKABLE = 12  # characters from which on a known value is replaced inside of words too
_BEGIN, _END = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
_ESCAPE = re.compile(r"(\\+[nrtbf\"/]|\\+u[0-9a-fA-F]{4}|\\+x[0-9a-fA-F]{2})")
_COLOUR = re.compile(r"(?:\x1b|\\+x1b|\\+u001b|\\+033)\[[0-9;]*[A-Za-z]")
_PRIVATE = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY\1?-----|\Z)", re.S
)
_PUBLIC = re.compile(r"(?:(?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]+ +)?AAAA[A-Za-z0-9+/]{30,}={0,3}(?: [\w.-]+@[\w.-]+)?")
_PRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{20,}=?")
_TOKENS = re.compile(
    r"\b(?:hf_\w{10,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_BEARER = re.compile(r"(?i)\b((?:bearer|authorization: *basic) +)([A-Za-z0-9+/=._~-]{8,})")
_ASSIGNED = re.compile(
    r"(?i)((?<![A-Za-z0-9])[\w.-]*(?:key|token(?!s|iz)|secret|passw|passphrase|credential|auth(?!or))[\w.-]*"
    r"[\"']?\s*[=:]\s*)(\"[^\"\n]{3,}\"|'[^'\n]{3,}'|[^\s\"',;<>()\[\]{}]{6,})"
)
_LOGIN = re.compile(r"(://)([^/\s:@]+:[^/\s@]+)(?=@)")
_EMAIL = re.compile(r"(?<![\w.+-])([\w.+-]+)@((?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?![\w])")
_AT = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]*)(?=@(?:host|ip)-\d+)")
_SERIAL = re.compile(r"(?i)(serial(?:[ _]?(?:number|num|no))?[\"']?\s*[:=]\s*[\"']?)([A-Za-z0-9][\w-]{3,})")
_DASHED_MAC = re.compile(r"(?<![\w-])(?:[0-9a-fA-F]{2}-){5,7}[0-9a-fA-F]{2}(?![\w-])")
_CLOUD = re.compile(_BEGIN + r"(?:ip|ec2)(?:-\d{1,3}){4}" + _END)
_HEX64 = re.compile(r"(?<![\w])0[xX](?!0000)[0-9a-fA-F]{16}(?!\w)")
_GPU = re.compile(r"\b(?:GPU|MIG|RTX)-[0-9a-fA-F]{8,16}(?![0-9a-fA-F-])")


class Masker:
    """Replaces what identifies. It alone knows what stands for what, and goes with the process."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, str]] = {}  # kind -> what it was -> its placeholder
        self._known: dict[str, str] = {}  # exact text -> placeholder
        self._versions: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many different values of each kind were replaced."""
        return dict(Counter(kind for kind, values in self._names.items() for _ in values))

    def learn(self, kind: str, values: Iterable[object], *, as_one: str = "") -> None:
        """Values that identify, whatever they look like. `as_one`: all of them are spellings of this one."""
        for value in values:
            text = str(value or "").strip()
            if len(text) > 1 and text.lower() not in COMMON and not NOT_SERIAL.fullmatch(text):
                self._known[text.lower()] = self._placeholder(kind, (as_one or text).lower())
        self._pattern = None

    def learn_versions(self, values: Iterable[object]) -> None:
        """Version numbers, of which some look like addresses: these stay."""
        self._versions |= {str(v) for v in values if v}

    def learn_serials(self, text: str) -> None:
        """What a tool's output calls a serial number or a unique identity."""
        found = [m.strip() for place in SERIAL_PLACES for m in place.findall(text)]
        self.learn("serial", (s for s in found if len(s) >= 4))

    def text(self, text: str) -> str:
        """`text` with everything that identifies replaced, also behind an escape (`\\nnode1` in quoted output)."""
        whole = self._replaced(_COLOUR.sub("", text))
        return "".join(part if n % 2 else self._replaced(part) for n, part in enumerate(_ESCAPE.split(whole)))

    def data(self, data: Any) -> Any:
        """Plain data with every string in it replaced, keys too; JSON inside strings is text like any other."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, Mapping):
            return {self.text(str(k)): self._value(str(k), v) for k, v in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.data(v) for v in data]
        if isinstance(data, int) and abs(data) >= _LEAST_IDENTITY:
            return self._known.get(str(data), data)  # an identity written as a number
        return data

    def file(self, name: str, content: str) -> str:
        """A file's content: JSON is taken apart first, since its escapes would hide what stands behind them."""
        try:
            if name.endswith(".json"):
                return json.dumps(self.data(json.loads(content)), indent=1, ensure_ascii=False) + "\n"
            if name.endswith(".jsonl"):
                rows = [json.loads(line) for line in content.splitlines() if line.strip()]
                return "".join(json.dumps(self.data(row), ensure_ascii=False) + "\n" for row in rows)
        except (ValueError, RecursionError):
            pass  # not what its name says, or cut: it is text
        return self.text(content)

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and value and SECRET_NAME.search(key):
            return self._placeholder("secret", value)
        return self.data(value)

    def _replaced(self, text: str) -> str:
        for replace in self._steps() if text else ():
            text = replace(text)
        return text

    @cache  # noqa: B019 - one masker lives as long as its process
    def _steps(self) -> list[Callable[[str], str]]:
        def by(pattern: re.Pattern[str], kind: str) -> Callable[[str], str]:
            return lambda text: pattern.sub(lambda m: self._placeholder(kind, m.group().lower()), text)

        def after(pattern: re.Pattern[str], kind: str) -> Callable[[str], str]:
            return lambda text: pattern.sub(lambda m: m.group(1) + self._placeholder(kind, m.group(2)), text)

        return [
            by(_PRIVATE, "key"),
            by(_PUBLIC, "key"),
            by(_PRINT, "key"),
            self._known_words,
            by(_TOKENS, "secret"),
            after(_BEARER, "secret"),
            after(_LOGIN, "secret"),
            after(_ASSIGNED, "secret"),
            lambda text: _EMAIL.sub(self._email, text),
            by(_GPU, "serial"),
            by(UUID, "uuid"),
            by(MAC, "mac"),
            by(_DASHED_MAC, "mac"),
            lambda text: IPV6.sub(lambda m: self._address(m.group()), text),
            by(GUID, "guid"),
            by(_HEX64, "guid"),
            by(HEX32, "id"),
            by(_CLOUD, "host"),
            lambda text: IPV4.sub(lambda m: self._address(m.group()), text),
            after(_SERIAL, "serial"),
            lambda text: _AT.sub(lambda m: self._user(m.group(1)), text),
            lambda text: HOME.sub(lambda m: m.group(1) + self._user(m.group(2)), text),
        ]

    def _known_words(self, text: str) -> str:
        if self._pattern is None and self._known:
            longest = sorted(self._known, key=len, reverse=True)
            words = (w if len(w) >= _UNMISTAKABLE else _BEGIN + w + _END for w in map(re.escape, longest))
            self._pattern = re.compile("|".join(words), re.IGNORECASE)
        # letters that only count as equal to others (a long s) have no lower case of theirs
        return (
            self._pattern.sub(lambda m: self._known.get(m.group().lower(), "hidden"), text) if self._pattern else text
        )

    def _address(self, text: str) -> str:
        """An address's placeholder (a GID made of one has the same); what only looks like one, a time, stays."""
        if text in self._versions:
            return text
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        mapped = getattr(address, "ipv4_mapped", None)
        address = mapped or address
        if address.is_loopback or address.is_unspecified or int(address) == 2**32 - 1:
            return text
        return self._placeholder("ip", str(address))

    def _email(self, match: re.Match[str]) -> str:
        return self._placeholder("user", match.group(1)) + "@" + self._placeholder("domain", match.group(2).lower())

    def _user(self, name: str) -> str:
        if name.lower() in COMMON:
            return name
        return self._placeholder("user", name.lower())

    def _placeholder(self, kind: str, value: str) -> str:
        of_kind = self._names.setdefault(kind, {})
        if value in of_kind.values():
            return value  # it is one already: a text that is masked twice stays as it is
        return of_kind.setdefault(value, f"{kind}-{len(of_kind) + 1}")


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of variables whose names say that they are secret."""
    return [v for name, v in environment.items() if SECRET_NAME.search(name) and len(v) >= _LEAST_SECRET]
