"""Who may call at a listening socket: the kernel drops what others send there before anything of it is kept.

A classic packet filter on the socket, which needs no privileges, and looks at where a packet comes from.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

MOST_NETWORKS = 64  # that a packet is held against: of more hosts than that, the networks they are in
_ATTACH_FILTER = 26  # of Linux' socket.h: Python does not name it
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of a word at a place, with a mask; of linux/bpf_common.h
_SOURCE = {4: (1 << 32) - 0x100000 + 12, 6: (1 << 32) - 0x100000 + 8}  # where the address stands, from the IP header on
_WHOLE = (1 << 32) - 1
_PROC = Path("/proc/net")
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def admit(listener: socket.socket, addresses: Iterable[str]) -> bool:
    """From now on only these may call; nobody where there are none. False where the kernel knows no such filters."""
    version = 6 if listener.family == socket.AF_INET6 else 4
    lines = [line for network in networks_of(addresses, version) for line in _passing(network)]
    program = b"".join(itertools.starmap(struct.Struct("=HBBI").pack, [*lines, (_RETURN, 0, 0, 0)]))
    memory = ctypes.create_string_buffer(program, len(program))
    try:
        pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)
    except OSError:
        return False
    return True


def networks_of(addresses: Iterable[str], version: int) -> list[Network]:
    """Those of one version, and no more than a packet can be held against: then the networks around them."""
    found = {address for address in (ipaddress.ip_address(a.partition('%')[0]) for a in addresses) if address.version == version}
    longest = 32 if version == 4 else 128
    for bits in range(longest, 0, -longest // 16):
        networks: set[Network] = {ipaddress.ip_network((address, bits), strict=False) for address in found}
        if len(networks) <= MOST_NETWORKS:
            break
    return sorted(networks, key=str)


def own_addresses() -> list[str]:
    """Every address of this host that connections of its own may come from."""
    found = []
    with contextlib.suppress(OSError):
        found += _LOCAL.findall((_PROC / "fib_trie").read_text())
    with contextlib.suppress(OSError):
        for line in (_PROC / "if_inet6").read_text().splitlines():
            found.append(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    return sorted(set(found))


def _passing(network: Network) -> list[tuple[int, int, int, int]]:
    """The lines that let packets from a network pass, and go on behind themselves for all others."""
    address, mask = network.network_address.packed, network.netmask.packed
    lines = [(_RETURN, 0, 0, _WHOLE)]
    for at in reversed(range(len(mask) // 4)):
        (value,), (bits,) = (struct.unpack_from("!I", packed, 4 * at) for packed in (address, mask))
        if bits:
            masked = [(_AND, 0, 0, bits)] if bits != _WHOLE else []
            load = (_LOAD, 0, 0, _SOURCE[network.version] + 4 * at)
            lines = [load, *masked, (_EQUAL, 0, len(lines), value), *lines]
    return lines
