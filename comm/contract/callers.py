"""Who may call at a listening socket: by where they come from, or by a secret that they know.

By where they come from the kernel tells: a classic packet filter on the socket, for which nobody needs privileges,
drops what others send before anything of it is kept. The secret is proved by a number that nobody was given before.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import ipaddress
import itertools
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_NETWORKS = 64  # that a packet is held against: of more hosts than that, the networks they are in
_ATTACH_FILTER = 26  # of Linux' socket.h: Python does not name it
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of a word at a place, with a mask; of linux/bpf_common.h
_SOURCE = {4: (1 << 32) - 0x100000 + 12, 6: (1 << 32) - 0x100000 + 8}  # where the address stands, from the IP header on
_WHOLE = (1 << 32) - 1
_PROC = Path("/proc/net")
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")

NONCE_BYTES, PROOF_BYTES = 16, 32
SILENT_S = 5.0  # that a caller may take to prove itself
MOST_OF_ONE = 4  # callers from one address that have not yet: strangers crowd out one another
MOST_AT_ONCE = 256  # taken from the queue in one turn

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


class Doorkeeper:
    """Callers at a listening socket, until they have proved that they know a secret; few are kept, for seconds."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener, self._secret = listener, secret
        self._callers: dict[socket.socket, tuple[str, bytes, float]] = {}  # address, number, until when

    def turn(self) -> list[tuple[socket.socket, str]]:
        """Those, and their addresses, that have proved it since the last turn; never blocks."""
        # nobody is there; or who was is gone, or its network: Linux tells that as an error of accept, too
        with contextlib.suppress(OSError):
            for _ in range(MOST_AT_ONCE):
                self._take(*self._listener.accept())
        found = []
        for channel, (address, nonce, until) in list(self._callers.items()):
            said = received(channel, PROOF_BYTES)
            if said is not None and hmac.compare_digest(said, proof(self._secret, nonce)):
                del self._callers[channel]
                found.append((channel, address))
            elif said is not None or time.monotonic() > until:
                self._send_away(channel)
        return found

    def wait(self, seconds: float) -> None:
        """Until somebody comes, or says something."""
        poll = select.poll()
        for channel in (self._listener, *self._callers):
            poll.register(channel, select.POLLIN)
        poll.poll(seconds * 1000)

    def close(self) -> None:
        """Send away all that are left, and listen no more."""
        for channel in list(self._callers):
            self._send_away(channel)
        self._listener.close()

    def _take(self, channel: socket.socket, place: Sequence[str]) -> None:
        of_one = [known for known, about in self._callers.items() if about[0] == place[0]]
        if len(of_one) >= MOST_OF_ONE:  # the oldest: one of ours proves itself at once
            self._send_away(of_one[0])
        channel.setblocking(False)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._callers[channel] = place[0], nonce, time.monotonic() + SILENT_S
        with contextlib.suppress(OSError):  # it is gone, as will be heard
            channel.send(nonce)

    def _send_away(self, channel: socket.socket) -> None:
        del self._callers[channel]
        channel.close()


def proof(secret: bytes, nonce: bytes) -> bytes:
    """What a caller says to the number that it is given."""
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def received(channel: socket.socket, count: int) -> bytes | None:
    """What came, up to so many bytes; None as long as nothing has. Whoever says it in pieces is none of ours."""
    try:
        return channel.recv(count)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def networks_of(addresses: Iterable[str], version: int) -> list[Network]:
    """Those of one version, and no more than a packet can be held against: then the networks around them."""
    found = {
        address
        for address in (ipaddress.ip_address(a.partition("%")[0]) for a in addresses)
        if address.version == version
    }
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
