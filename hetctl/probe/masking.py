"""Hides what identifies machines and people: in captures, which are discovered again, and in bundles, which are read.

One masker finds it, and knows what only looks like it (a version like an address): values that it has learned, wherever
they stand, and what patterns tell. What it puts there differs. `CaptureMasker` keeps every relation that discovery
reads: IP addresses keep the length of the prefix that any two of them share (Xu et al., prefix-preserving
anonymisation, ICNP 2002), so that subnets, and with them islands, come out the same. `ReportMasker` keeps nothing of
the original's shape: host-1, ip-3. A value has one mask everywhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetctl.probe.words import told

# The named group of a pattern is what is hidden, and its name the kind of it.
_PRIVATE = re.compile(
    r"(?P<key>-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----.*?(-----END [A-Z0-9 ]*PRIVATE KEY\2?-----|\Z))", re.S
)
_PUBLIC = re.compile(
    r"(?P<key>(?:(?:sk-)?(?:ssh|ecdsa)-[a-z0-9@.-]{1,100} +)?AAAA[A-Za-z0-9+/]{30,}={0,3}(?: [\w.-]+@[\w.-]+)?)"
)
_PRINT = re.compile(r"(?P<key>SHA256:[A-Za-z0-9+/]{20,}=?)")
_TOKENS = re.compile(
    r"\b(?P<secret>hf_\w{10,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]*)"
)
_BEARER = re.compile(r"(?i)\b(?:bearer|authorization: *basic) +(?P<secret>[A-Za-z0-9+/=._~-]{8,})")
_LOGIN = re.compile(r"://(?P<secret>[^/\s:@]+:[^/\s@]+)(?=@)")
_ASSIGNED = re.compile(
    r"(?i)(?:key|token(?!s|iz)|secret|passw|passphrase|credential|auth(?!or))[\w.-]{0,100}"
    r"[\"']?\s*[=:]\s*(?P<secret>\"[^\"\n]{3,}\"|'[^'\n]{3,}'|[^\s\"',;<>()\[\]{}]{6,})"
)
_EMAIL = re.compile(r"(?<![\w.+-])(?P<account>[\w.+-]+)@(?P<domain>(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?![\w])")
_GPU = re.compile(r"\b(?P<serial>(?:GPU|MIG|RTX)-[0-9a-fA-F]{8,16})(?![0-9a-fA-F-])")
_UUID = re.compile(r"(?<![0-9a-fA-F])(?P<uuid>[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})(?![0-9a-fA-F])")
_MAC = re.compile(r"(?<![\w:])(?P<mac>(?:[0-9a-fA-F]{2}:){5,19}[0-9a-fA-F]{2})(?![\w:])")
_DASHED_MAC = re.compile(r"(?<![\w-])(?P<mac>(?:[0-9a-fA-F]{2}-){5,7}[0-9a-fA-F]{2})(?![\w-])")
_IPV6 = re.compile(r"(?<![\w:.])(?P<ip>[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w:])")
_GUID = re.compile(r"(?<![\w:])(?P<guid>[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3})(?![\w:])")
_HEX64 = re.compile(r"(?<![\w])(?P<guid>0[xX](?!0000)[0-9a-fA-F]{16})(?!\w)")
_HEX32 = re.compile(r"(?<![\w])(?P<id>[0-9a-fA-F]{32})(?![\w])")
_CLOUD = re.compile(r"(?<![A-Za-z0-9])(?P<host>(?:ip|ec2)(?:-\d{1,3}){4})(?![A-Za-z0-9])")
_IPV4 = re.compile(  # a VBIOS has a fifth part: 86.04.60.00.BD
    r"(?<![\w.])(?P<ip>(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d))"
    r"(?!\w|\.\d|\.[0-9A-Fa-f]{2}(?!\w))"
)
_SERIAL = re.compile(r"(?i)serial(?:[ _]?(?:number|num|no))?[\"']?\s*[:=]\s*[\"']?(?P<serial>[A-Za-z0-9][\w-]{3,})")
_AT = re.compile(r"(?<![\w.-])(?P<user>[A-Za-z_][\w.-]*)(?=@(?:host|ip)-\d+)")
_HOME = re.compile(r"(?:/home/|/Users/)(?P<user>[^/\s\"':]+)")
_SERIAL_PLACES = (
    re.compile(r"<\w{0,60}serial\w{0,60}>([^<]+)<", re.IGNORECASE),
    re.compile(r'"[^"]{0,60}(?:serial|unique[ _]id|uuid)[^"]{0,60}"\s*:\s*"([^"]+)"', re.IGNORECASE),
    re.compile(r"^unique_id\s+(\d+)\s*$", re.MULTILINE),
)
_SERIAL_FILES = ("/serial_number", "/unique_id")
_LEAST_SERIAL = 4  # characters; shorter ones would be replaced everywhere
_FOUR_PARTS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)")
_VERSION_FILES = ("version", "/fw_ver")
_VERSION = re.compile(
    r"(?i)(?:version|v?bios|firmware|fw_?ver|revision)[\w/]{0,60}[ \t\"':=>{\[]{1,40}"
    r"v?(\d{1,3}(?:\.\d{1,3}){3})(?!\w|\.\d)"
)
# Keys of facts: what identifies, and as what kind; what is a version, and what holds versions by name.
_KINDS = {"serial": "serial", "uuid": "gpu", "guid": "guid", "mac": "mac", "machine_id": "id", "boot_id": "id"}
_VERSIONS = frozenset(("driver", "firmware", "version", "torch", "cuda", "hip", "nccl", "rccl", "kernel"))
_VERSIONS_BY_NAME = frozenset(("packages", "modules"))
COMMON = frozenset(("root", "localhost", "ubuntu", "debian", "rocky", "ec2-user", "user", "admin", "none", "unknown"))
_NOT_SERIAL = re.compile(r"(?i)\W*(n/?a|none|not supported|unknown|0x0+|0+)\W*")


class Masker(ABC):
    """Replaces keys, then what it has learned, then what its patterns find."""

    patterns: Sequence[re.Pattern[str]]
    around = (r"(?<![\w.-])", r"(?![\w.-])")  # what a learned value begins and ends at
    inside = 0  # characters from which on it is replaced inside of words too; 0: never
    ignore_case = False

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # what was learned -> its mask
        self._spotted: re.Pattern[str] | None = None
        self._versions: set[str] = set()
        self._addresses: set[str] = set()

    @abstractmethod
    def mask(self, kind: str, value: str) -> str:
        """What stands for a value."""

    @abstractmethod
    def address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address, text: str) -> str:
        """What stands for an IP address that was written so."""

    def learn(self, kind: str, values: Iterable[object], *, as_one: str = "") -> None:
        """Values that identify, whatever they look like. `as_one`: all of them are spellings of this one."""
        for text in (str(value or "").strip() for value in values):
            if self._identifies(kind, text):
                self._remember(text, self.mask(kind, as_one or text))

    def learn_versions(self, values: Iterable[str]) -> None:
        """Texts with version numbers, of which some look like addresses: these stay."""
        self._versions.update(part for value in values for part in _FOUR_PARTS.findall(value))

    def learn_texts(self, texts: Iterable[tuple[str, str]]) -> None:
        """What (path or tool name, content) pairs call a serial number or a version."""
        for path, text in texts:
            own = text.strip()
            serials = [*serials_in(text), *([own] if path.endswith(_SERIAL_FILES) else [])]
            self.learn("serial", (serial for serial in serials if len(serial) >= _LEAST_SERIAL))
            self.learn_versions([*_VERSION.findall(text), *([own] if path.endswith(_VERSION_FILES) else [])])

    def learn_facts(self, facts: Any) -> None:
        """What the plain data of hosts' facts hold of devices, machines, addresses and versions."""
        for key, value in _texts(facts):
            if key in _KINDS:
                self.learn(_KINDS[key], _spellings(value), as_one=value)
            elif key in _VERSIONS | _VERSIONS_BY_NAME:
                self.learn_versions([value])
            elif key == "ip":
                self._addresses.add(value)

    def text(self, text: str) -> str:
        """`text` with everything that identifies replaced."""
        for pattern in (_PRIVATE, _PUBLIC, _PRINT):  # whole, before something known inside of them goes
            text = pattern.sub(self._hidden, text)
        if self._known and text:
            self._spotted = self._spotted or self._any_known()
            text = self._spotted.sub(self._known_mask, text)
        for pattern in self.patterns:
            text = pattern.sub(self._hidden, text)
        return text

    def data(self, data: Any, key: str = "") -> Any:
        """Plain data with every string in it replaced, keys too; JSON inside strings is text like any other."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, Mapping):
            return {self.text(str(k)): self.data(v, str(k)) for k, v in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.data(v) for v in data]
        return data

    def _identifies(self, kind: str, text: str) -> bool:
        """False for what stands for nothing known, and for names that say nothing."""
        known = told(text) is not None and not _NOT_SERIAL.fullmatch(text)
        return known and len(text) > 1 and text.lower() not in COMMON

    def _address(self, text: str) -> str:
        """An address's mask; what only looks like one, a version or a time, stays."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        return text if text in self._versions - self._addresses else self.address(address, text)

    def _remember(self, value: str, mask: str) -> None:
        self._known.setdefault(value, mask)
        self._spotted = None

    def _hidden(self, match: re.Match[str]) -> str:
        """What a pattern found, its named groups replaced."""
        text = match.group()
        for kind in list(match.re.groupindex)[::-1]:  # from behind, so that what stands before keeps its place
            begin, end = (at - match.start() for at in match.span(kind))
            text = text[:begin] + self.mask(kind, match[kind]) + text[end:]
        return text

    def _any_known(self) -> re.Pattern[str]:
        begin, end = self.around
        longest = map(re.escape, sorted(self._known, key=len, reverse=True))
        words = (w if 0 < self.inside <= len(w) else begin + w + end for w in longest)
        return re.compile("|".join(words), re.IGNORECASE if self.ignore_case else 0)

    def _known_mask(self, match: re.Match[str]) -> str:
        # letters that only count as equal to others (a long s) have no lower case of theirs
        word = match.group()
        return self._known.get(word) or self._known.get(word.lower(), "hidden")


# --- captures ------------------------------------------------------------------------------------------------------


class CaptureMasker(Masker):
    """One capture's masks. `names`: host names to hide; `salt` decides the masks and must be kept by nobody."""

    patterns = (_TOKENS, _BEARER, _LOGIN, _HOME, _UUID, _MAC, _IPV6, _GUID, _HEX32, _IPV4)

    def __init__(self, names: Iterable[str], salt: bytes) -> None:
        super().__init__()
        self._salt = salt
        self._hosts: dict[str, str] = {}
        for number, name in enumerate(sorted(set(names)), start=1):
            self._hosts[name] = f"host-{number:03d}"
            short = name.split(".")[0]
            if not re.fullmatch(r"[\d.]+", name):  # an address has no short form
                self._hosts.setdefault(short, f"host-{number:03d}")
        for name in filter(_distinct, self._hosts):
            self._remember(name, self._hosts[name])

    def learn(self, kind: str, values: Iterable[object], *, as_one: str = "") -> None:
        """As any masker; spellings of one keep their shapes, which have one mask by themselves."""
        super().learn(kind, values)

    def mask(self, kind: str, value: str) -> str:
        """Another value of the same kind and shape; of what is secret nothing stays."""
        if kind == "ip":
            return self._address(value)
        if kind == "id":
            return f"{self._digest('hex', value.lower()):064x}"[:32]
        if kind == "user":
            return f"user-{self._digest('user', value) % 1000:03d}"
        shaped = {"uuid": self._uuid, "mac": self._mac, "guid": self._guid_text, "serial": self._serial}
        shaped["gpu"] = self._unique
        return shaped[kind](value) if kind in shaped else "hidden"

    def address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address, text: str) -> str:
        """Another address, written as long."""
        if isinstance(address, ipaddress.IPv4Address):
            return str(self.ipv4(address))
        masked = self.ipv6(address)
        return masked.exploded if len(text) == 39 else str(masked)

    def _identifies(self, kind: str, text: str) -> bool:
        """Also not what a pattern finds, and no plain words."""
        if kind == "user":
            return super()._identifies(kind, text) and _distinct(text)
        unlike = super()._identifies(kind, text) and not _UUID.search(text)
        return unlike and (kind == "serial" or (kind == "gpu" and not text.startswith("GPU-")))

    def host(self, name: str) -> str:
        """The mask of a host's name, whatever it is."""
        return self._hosts.get(name) or self._hosts.get(name.split(".")[0]) or self.text(name)

    def if_inet6(self, text: str) -> str:
        """/proc/net/if_inet6, where addresses are 32 digits without colons."""

        def masked(match: re.Match[str]) -> str:
            return f"{int(self.ipv6(ipaddress.IPv6Address(int(match.group(), 16)))):032x}"

        return _HEX32.sub(masked, text)

    def ipv4(self, address: ipaddress.IPv4Address) -> ipaddress.IPv4Address:
        """Another address of the same kind (private, public), sharing prefixes exactly as the original did."""
        if address.is_loopback or address.is_link_local or address.is_unspecified or int(address) == 2**32 - 1:
            return address
        return ipaddress.IPv4Address(self._prefix_preserving("4", int(address), 32, 8))

    def ipv6(self, address: ipaddress.IPv6Address) -> ipaddress.IPv6Address:
        """As `ipv4`; a link-local or GID address keeps its prefix and gets its GUID's mask; mapped ones go by IPv4."""
        value = int(address)
        if value <= 1:
            return address
        if address.ipv4_mapped:
            return ipaddress.IPv6Address((0xFFFF << 32) + int(self.ipv4(address.ipv4_mapped)))
        high, low = value >> 64, value & (2**64 - 1)
        if address.is_multicast:
            return address
        if high >> 54 != 0xFE80 >> 6:
            high = self._prefix_preserving("6", high, 64, 16)
        elif high != 0xFE80 << 48:  # an InfiniBand subnet prefix of the site's own
            high = 0xFE80 << 48 | self._digest("prefix", f"{high:x}") & (2**48 - 1)
        return ipaddress.IPv6Address(high << 64 | self._guid(low))

    def _prefix_preserving(self, kind: str, value: int, bits: int, kept: int) -> int:
        result = value >> (bits - kept)
        for position in range(kept, bits):
            prefix = value >> (bits - position)
            on_special_path = kind == "4" and (position, prefix) in _SPECIAL_PATHS
            flip = 0 if on_special_path else self._digest(kind, f"{position}:{prefix:x}") & 1
            result = result << 1 | (value >> (bits - 1 - position) & 1) ^ flip
        return result

    def _guid(self, value: int) -> int:
        return self._digest("guid", f"{value:x}") & (2**64 - 1) if value else 0

    def _guid_text(self, text: str) -> str:
        value = int(text.replace(":", ""), 16)
        if value == 0xFE80 << 48:
            return text  # the default subnet prefix, alone
        digits = f"{self._guid(value):016x}"
        return ":".join(digits[i : i + 4] for i in range(0, 16, 4))

    def _mac(self, text: str) -> str:
        """The maker's half stays; of InfiniBand's 20 bytes the last 8, the GUID, go."""
        parts = text.split(":")
        if not text.strip("0:") or not text.lower().strip("f:"):
            return text
        hidden = 3 if len(parts) == 6 else min(8, len(parts))
        if len(parts) == 20:
            digits = f"{self._guid(int(''.join(parts[-8:]), 16)):016x}"
        else:
            digits = f"{self._digest('mac', text.lower()):064x}"[: 2 * hidden]
        return ":".join(parts[:-hidden] + [digits[i : i + 2] for i in range(0, 2 * hidden, 2)])

    def _uuid(self, text: str) -> str:
        digits = f"{self._digest('uuid', text.lower()):064x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"

    def _serial(self, text: str) -> str:
        """Another serial of the same shape. A 64-bit identity has one mask, written decimal or hexadecimal."""
        hexadecimal = re.fullmatch(r"(0[xX](?=.)|(?=.{16}$))([0-9a-fA-F]{1,16})", text)
        if hexadecimal:
            digits = f"{self._identity(int(hexadecimal.group(2), 16)):016x}"
            digits = digits.upper() if hexadecimal.group(2).isupper() else digits
            return hexadecimal.group(1) + digits
        if re.fullmatch(r"\d{17,20}", text):
            return str(self._identity(int(text)))
        stream = f"{self._digest('serial', text):064x}"
        return "".join(_same_kind(c, int(stream[i % 64], 16)) for i, c in enumerate(text))

    def _unique(self, text: str) -> str:
        """The same of one that is known to have 64 bits, however few digits it needs."""
        return str(self._identity(int(text))) if text.isdecimal() and len(text) != 16 else self._serial(text)

    def _identity(self, value: int) -> int:
        return self._digest("identity", str(value)) & (2**63 - 1) | 2**63  # keeps 16 digits, or 19

    def _digest(self, kind: str, value: str) -> int:
        mac = hmac.new(self._salt, f"{kind}:{value}".encode("utf-8", "replace"), hashlib.sha256)
        return int.from_bytes(mac.digest(), "big")


# Blocks with a meaning map onto themselves, and nothing else onto them: no bit is flipped on the way down to them.
_SPECIAL = map(ipaddress.IPv4Network, ("172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"))
_SPECIAL_PATHS = frozenset(
    (position, int(block.network_address) >> (32 - position))
    for block in _SPECIAL
    for position in range(block.prefixlen)
)


def _same_kind(character: str, number: int) -> str:
    if character.isdecimal():
        return str(number % 10)
    if character.isalpha():
        letter = "ABCDEFGHIJKLMNOP"[number]
        return letter if character.isupper() else letter.lower()
    return character


def _distinct(name: str) -> bool:
    """False for short plain words (gpu, node): replacing those everywhere would break formats and hides nothing."""
    return len(name) >= 6 or (len(name) >= 3 and any(not c.isalpha() for c in name))


# --- bundles -------------------------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASS(?!E|I)|CRED|AUTH(?!OR)", re.IGNORECASE)
_LEAST_SECRET = 6  # shorter values are words like `yes`, and would be replaced everywhere
_LEAST_IDENTITY = 10**9  # smaller numbers are figures
_ESCAPE = re.compile(r"((?<!\\)\\+(?:[nrtbf\"/]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}))")
_COLOUR = re.compile(r"(?:\x1b|(?<!\\)\\+(?:x1b|u001b|033))\[[0-9;]*[A-Za-z]")


class ReportMasker(Masker):
    """Placeholders. It alone knows what stands for what, and goes with the process. Names that say nothing stay."""

    patterns = (
        *(_TOKENS, _BEARER, _LOGIN, _ASSIGNED, _EMAIL, _GPU, _UUID, _MAC, _DASHED_MAC, _IPV6, _GUID, _HEX64, _HEX32),
        *(_CLOUD, _IPV4, _SERIAL, _AT, _HOME),
    )
    around = (r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])")  # `node1.` and `node1_x` name a host
    inside = 12
    ignore_case = True

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, dict[str, str]] = {}  # kind -> what it was -> its placeholder

    @property
    def counts(self) -> dict[str, int]:
        """How many different values of each kind were replaced."""
        return dict(Counter(kind for kind, values in self._names.items() for _ in values))

    def text(self, text: str) -> str:
        """As any masker's, and once more behind each escape (`\\nnode1` in quoted output)."""
        whole = super().text(_COLOUR.sub("", text))
        parts = enumerate(_ESCAPE.split(whole))
        return "".join(part if n % 2 else super(ReportMasker, self).text(part) for n, part in parts)

    def data(self, data: Any, key: str = "") -> Any:
        """As any masker's, and also what stands under a secret's name, and identities written as numbers."""
        if isinstance(data, str) and data and _SECRET_NAME.search(key):
            return self._placeholder("secret", data)
        if isinstance(data, int) and abs(data) >= _LEAST_IDENTITY:
            return self._known.get(str(data), data)
        return super().data(data, key)

    def mask(self, kind: str, value: str) -> str:
        """The placeholder of a value."""
        if kind == "ip":
            return self._address(value)
        if kind == "user" and value.lower() in COMMON:
            return value
        return self._placeholder("user" if kind == "account" else kind, value)

    def address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address, text: str) -> str:
        """Its placeholder; a GID made of one has the same."""
        address = getattr(address, "ipv4_mapped", None) or address
        stays = address.is_loopback or address.is_unspecified or int(address) == 2**32 - 1
        return text if stays else self._placeholder("ip", str(address))

    def _remember(self, value: str, mask: str) -> None:
        super()._remember(value.lower(), mask)

    def _placeholder(self, kind: str, value: str) -> str:
        value, of_kind = value.lower(), self._names.setdefault(kind, {})
        if value in of_kind.values():
            return value  # it is one already: a text that is masked twice stays as it is
        return of_kind.setdefault(value, f"{kind}-{len(of_kind) + 1}")


def serials_in(text: str) -> list[str]:
    """What a tool's output calls a serial number or a unique identity."""
    return [serial.strip() for place in _SERIAL_PLACES for serial in place.findall(text)]


def _texts(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in plain data and the key that it stands under."""
    if isinstance(data, str):
        yield key, data
    elif isinstance(data, Mapping):
        for name, value in data.items():
            yield from _texts(value, key if key in _VERSIONS_BY_NAME else name)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value, key)


def _spellings(identity: str) -> Iterable[str]:
    """A GUID with and without colons; GPU-<64 bits in hexadecimal>, as AMD's tools write it: also bare and decimal."""
    text = identity.removeprefix("GPU-")
    yield from (identity, identity.replace(":", ""))
    if re.fullmatch(r"[0-9a-fA-F]{16}", text) and int(text, 16) >= _LEAST_IDENTITY:
        yield from (text, f"0x{text}", f"{int(text, 16):#x}", str(int(text, 16)))


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of variables whose names say that they are secret."""
    return [v for name, v in environment.items() if _SECRET_NAME.search(name) and len(v) >= _LEAST_SECRET]
