"""Hides what identifies machines and people in raw material, keeping every relation that discovery reads.

The same value gets the same mask everywhere. IP addresses keep the length of the prefix that any two of them share
(Xu et al., prefix-preserving anonymisation, ICNP 2002), so that subnets, and with them islands, come out the same.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence

_WORD_END = r"(?![\w.-])"
_WORD_START = r"(?<![\w.-])"
IPV4 = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")
GUID = re.compile(r"(?<![\w:])[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3}(?![\w:])")
MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5,19}[0-9a-fA-F]{2}(?![\w:])")
UUID = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F])")
HEX32 = re.compile(r"(?<![\w])[0-9a-fA-F]{32}(?![\w])")
HOME = re.compile(r"(/home/|/Users/)([^/\s\"':]+)")
SERIAL_PLACES = (
    re.compile(r"<\w*serial\w*>([^<]+)<", re.IGNORECASE),
    re.compile(r'"[^"]*(?:serial|unique[ _]id|uuid)[^"]*"\s*:\s*"([^"]+)"', re.IGNORECASE),
    re.compile(r"^unique_id\s+(\d+)\s*$", re.MULTILINE),
)
_SERIAL_FILES = ("/serial_number", "/unique_id")
NOT_SERIAL = re.compile(r"(?i)\W*(n/?a|none|not supported|unknown|0x0+|0+)\W*")


class CaptureMasker:
    """One capture's masks. `names`: host names to hide; `salt` decides the masks and must be kept by nobody."""

    def __init__(self, names: Iterable[str], salt: bytes) -> None:
        self._salt = salt
        self._hosts: dict[str, str] = {}
        for number, name in enumerate(sorted(set(names)), start=1):
            self._hosts[name] = f"host-{number:03d}"
            short = name.split(".")[0]
            if not re.fullmatch(r"[\d.]+", name):  # an address has no short form
                self._hosts.setdefault(short, f"host-{number:03d}")
        self._tokens: dict[str, str] = {}
        self._host_pattern = _any_of([n for n in self._hosts if _distinct(n)])
        self._token_pattern: re.Pattern[str] | None = None

    def learn(self, texts: Iterable[tuple[str, str]], people: Iterable[str]) -> None:
        """Note the serial numbers in (path or tool name, content) pairs, and the names of people."""
        for path, text in texts:
            found = [m for place in SERIAL_PLACES for m in place.findall(text)]
            if path.endswith(_SERIAL_FILES):
                found.append(text)
            for serial in (s.strip() for s in found):
                if len(serial) >= 4 and not NOT_SERIAL.fullmatch(serial) and not UUID.search(serial):
                    self._tokens.setdefault(serial, self._serial(serial))
        for person in people:
            if person and person != "root" and _distinct(person):
                self._tokens.setdefault(person, f"user-{self._digest('user', person) % 1000:03d}")
        self._token_pattern = _any_of(list(self._tokens))

    def host(self, name: str) -> str:
        """The mask of a host's name, whatever it is."""
        return self._hosts.get(name) or self._hosts.get(name.split(".")[0]) or self.text(name)

    def text(self, text: str) -> str:
        """`text` with everything that identifies replaced."""
        if self._host_pattern:
            text = self._host_pattern.sub(lambda m: self._hosts[m.group()], text)
        if self._token_pattern:
            text = self._token_pattern.sub(lambda m: self._tokens[m.group()], text)
        text = HOME.sub(lambda m: m.group(1) + f"user-{self._digest('user', m.group(2)) % 1000:03d}", text)
        text = UUID.sub(lambda m: self._uuid(m.group()), text)
        text = MAC.sub(lambda m: self._mac(m.group()), text)
        text = IPV6.sub(lambda m: self._ipv6_text(m.group()), text)
        text = GUID.sub(lambda m: self._guid_text(m.group()), text)
        text = HEX32.sub(lambda m: f"{self._digest('hex', m.group().lower()):064x}"[:32], text)
        return IPV4.sub(lambda m: str(self.ipv4(ipaddress.IPv4Address(m.group()))), text)

    def if_inet6(self, text: str) -> str:
        """/proc/net/if_inet6, where addresses are 32 digits without colons."""

        def masked(match: re.Match[str]) -> str:
            return f"{int(self.ipv6(ipaddress.IPv6Address(int(match.group(), 16)))):032x}"

        return HEX32.sub(masked, text)

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

    def _ipv6_text(self, text: str) -> str:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        masked = self.ipv6(address)
        return masked.exploded if len(text) == 39 else str(masked)

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
        hexadecimal = re.fullmatch(r"(0[xX])?([0-9a-fA-F]{16})", text)
        if hexadecimal:
            digits = f"{self._identity(int(hexadecimal.group(2), 16)):016x}"
            digits = digits.upper() if hexadecimal.group(2).isupper() else digits
            return (hexadecimal.group(1) or "") + digits
        if re.fullmatch(r"\d{17,20}", text):
            return str(self._identity(int(text)))
        stream = f"{self._digest('serial', text):064x}"
        return "".join(_same_kind(c, int(stream[i % 64], 16)) for i, c in enumerate(text))

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


def _any_of(words: Sequence[str]) -> re.Pattern[str] | None:
    if not words:
        return None
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(_WORD_START + "(?:" + "|".join(map(re.escape, longest_first)) + ")" + _WORD_END)


def _distinct(name: str) -> bool:
    """False for short plain words (gpu, node): replacing those everywhere would break formats and hides nothing."""
    return len(name) >= 6 or (len(name) >= 3 and any(not c.isalpha() for c in name))
