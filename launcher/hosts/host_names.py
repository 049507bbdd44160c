"""Host names as people write them: `node[01-16]`, `user@host:port`, IPv6 in brackets, several joined by commas."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetctl.comm.contract.errors import ConfigError

MAX_HOSTS = 20_000  # more is a typing error, and would be expanded into memory
_RANGE = re.compile(r"(\d+)-(\d+)")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]*")
_COMMA = re.compile(r",|\[[^\]]*")  # or a bracket's inside, whose commas are its own
_IPV6 = re.compile(r"\[(?=[^:]*:[^:]*:)([0-9A-Fa-f:.]*(?:%\w+)?)\](?::(\d+))?")
_FLAT = re.compile(r"[^][]*(?:\[[^][]*\][^][]*)*")  # brackets inside of brackets multiply, uncounted
_LONG = re.compile(r"\d{19}")
_SHAPE = "write host, user@host:port, or node[01-16]"


@dataclass(frozen=True)
class HostName:
    """One host as written: a name or an address, and what was said of user and port."""

    host: str
    user: str | None = None
    port: int | None = None


def expand(text: str) -> list[HostName]:
    """Every host of `text`, in order, each once. Raises ConfigError for anything that cannot be a host name."""
    spots: dict[str, HostName] = {}
    cuts = [found.start() for found in _COMMA.finditer(text) if found[0] == ","]
    for begin, end in pairwise((-1, *cuts, len(text))):
        part = text[begin + 1 : end]
        user, host, port = _take_apart(part.strip(), text)
        for name in _names(host):
            spots[name] = HostName(check_host(name), user, port)
        if len(spots) > MAX_HOSTS:
            raise ConfigError(f"'{text}' names more than {MAX_HOSTS} hosts", hint=_SHAPE)
    return list(spots.values())


def fold(names: Sequence[str]) -> str:
    """Many names in short, as `expand` reads them: node[01-16]."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name that is none to it
        return ",".join(names)


def check_host(name: str) -> str:
    """`name`, if SSH may be given it: no leading dash, nothing a shell or an option parser would read."""
    if _HOST.fullmatch(name) or _is_ipv6(name):
        return name
    why = "begins with '-'" if name.startswith("-") else "holds characters no host name has"
    raise ConfigError(f"{name!r} is not a host name: it {why}", hint=_SHAPE)


def _take_apart(part: str, text: str) -> tuple[str | None, str, int | None]:
    if not part:
        raise ConfigError(f"'{text}' holds an empty host name", hint=_SHAPE)
    user, at, host = part.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ConfigError(f"{user!r} in '{text}' is not a user name", hint=_SHAPE)
    bracketed = _IPV6.fullmatch(host)
    if bracketed:
        return user or None, bracketed[1], _port(bracketed[2], text)
    if _is_ipv6(host):
        return user or None, host, None
    host, colon, port = host.partition(":")
    return user or None, host, _port(port if colon else None, text)


def _port(digits: str | None, text: str) -> int | None:
    if digits is None:
        return None
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) < 65536):
        raise ConfigError(f"'{digits}' in '{text}' is not a port (1 to 65535)", hint=_SHAPE)
    return int(digits)


def _names(pattern: str) -> list[str]:
    if "[" not in pattern and "]" not in pattern:
        return [pattern]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # 30 ms only ranges need

    if set(pattern) & set("!&^@* ") or not _FLAT.fullmatch(pattern) or _LONG.search(pattern):
        raise ConfigError(f"'{pattern}' is not a range of host names", hint=_SHAPE)
    if _count(pattern) > MAX_HOSTS:
        raise ConfigError(f"'{pattern}' names more than {MAX_HOSTS} hosts", hint=_SHAPE)
    try:
        return list(NodeSet(pattern, resolver=RESOLVER_NOGROUP))
    except (NodeSetException, ValueError, AssertionError) as error:  # a second step; digits after a range
        raise ConfigError(f"'{pattern}' is not a range of host names: {error}", hint=_SHAPE) from None


def _count(pattern: str) -> int:
    """An upper bound of how many names a pattern stands for: brackets multiply, ranges in one bracket add."""
    total = 1
    for bracket in re.findall(r"\[([^][]*)\]", pattern):
        total *= sum(int(m[2]) - int(m[1]) + 1 if (m := _RANGE.match(item)) else 1 for item in bracket.split(","))
    return total


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    _, percent, zone = text.partition("%")
    return not percent or (zone.isascii() and zone.isalnum())
