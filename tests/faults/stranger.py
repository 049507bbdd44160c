"""A stranger, alone in a host's network: python stranger.py KIND; stands alone, standard library only.

Each line of stdin is a JSON object, `address:port` -> what was once sent to such a port (hex, one text a connection).
It calls at those ports until stdin ends, and then says per port how often it tried, was connected, was told anything.
As KIND `listen` it says until then what others send to any port, for `replay`: as root, from the wire.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

AT_ONCE = {"stay": 1, "flood": 200, "garbage": 4, "half-open": 20, "replay": 8}  # connections to a port
KEEPS = ("stay", "flood", "half-open")  # what it has, until the other end closes it
A_SECOND = 400.0  # new connections to all ports together: the hosts share this machine's cores
TURN_S = 0.02  # no turn follows the last at once: this machine's cores share more than they say
PATIENCE_S = 3.0  # with a connection that does not come about
LINGER_S = 0.3  # after having said something
MOST = 1 << 16  # bytes that are remembered of a connection
RESET = struct.pack("ii", 1, 0)
GARBAGE = (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\1" + b"\0" * 7 + b"\xff" * 56)


@dataclass
class Call:
    place: str
    began: float
    up: bool = False
    said: bool = False


@dataclass
class Stranger:
    kind: str
    targets: dict[str, list[str]] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)  # tried, connected, answered
    calls: dict[socket.socket, Call] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ)
        rest, credit, last = b"", 0.0, time.monotonic()
        while True:
            time.sleep(0 if rest else TURN_S)
            for key, _ in self.selector.select(0):
                if key.fileobj == 0:
                    data = os.read(0, 1 << 22)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    if lines:
                        self.targets = json.loads(lines[-1])
                        self.leave()
                elif key.fileobj in self.calls:
                    self.turn(key.fileobj)
            now = time.monotonic()
            credit, last = min(credit + (now - last) * A_SECOND, A_SECOND), now
            self.hang_up(now)
            credit = self.call_all(credit, now)

    def leave(self) -> None:
        """What is at ports that are targets no longer."""
        for sock in [sock for sock, call in self.calls.items() if call.place not in self.targets]:
            self.close(sock)

    def call_all(self, credit: float, now: float) -> float:
        busy: dict[str, int] = {}
        for call in self.calls.values():
            busy[call.place] = busy.get(call.place, 0) + 1
        places = list(self.targets)
        random.shuffle(places)
        for place in places:
            while credit >= 1 and busy.get(place, 0) < AT_ONCE[self.kind]:
                busy[place] = busy.get(place, 0) + 1
                credit -= 1
                self.call(place, now)
        return credit

    def call(self, place: str, now: float) -> None:
        address, _, port = place.rpartition(":")
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        self.told.setdefault(place, [0, 0, 0])[0] += 1
        if sock.connect_ex((address, int(port))) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self.calls[sock] = Call(place, now)
        self.selector.register(sock, selectors.EVENT_WRITE)

    def turn(self, sock: socket.socket) -> None:
        call = self.calls[sock]
        try:
            if not call.up:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return self.close(sock)
                call.up, call.began = True, time.monotonic()
                self.told[call.place][1] += 1
                self.speak(sock, call)
                self.selector.modify(sock, selectors.EVENT_READ)
            elif not sock.recv(65536):
                self.close(sock)
            elif not call.said:
                call.said = True
                self.told[call.place][2] += 1
        except OSError:
            self.close(sock)

    def speak(self, sock: socket.socket, call: Call) -> None:
        if self.kind == "garbage":
            sock.send(random.choice([*GARBAGE, os.urandom(4096)]))
        elif self.kind == "half-open":
            sock.send(os.urandom(random.randrange(1, 8)))
            if random.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
        elif self.kind == "replay" and self.targets.get(call.place):
            sock.send(bytes.fromhex(random.choice(self.targets[call.place])))

    def hang_up(self, now: float) -> None:
        """On those that do not come about or, where this one does not stay, have heard all: every other by a reset."""
        for sock, call in list(self.calls.items()):
            if now - call.began > (LINGER_S if call.up else PATIENCE_S) and not (call.up and self.kind in KEEPS):
                if random.random() < 0.5:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.close(sock)

    def close(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        del self.calls[sock]
        sock.close()


def overhear() -> dict[str, list[str]]:
    """What each connection of this host's network sends to the end that it called, from its first byte on."""
    streams: dict[tuple[str, str], dict[int, bytes]] = {}
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    while 0 not in (ready := select.select([wire, 0], [], [])[0]):
        packet = wire.recv(1 << 17) if ready else b""
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            continue
        start, whole = (packet[0] & 15) * 4, struct.unpack("!H", packet[2:4])[0]
        source, to, number = struct.unpack("!HHI", packet[start : start + 8])
        ends = [f"{socket.inet_ntoa(packet[a : a + 4])}:{port}" for a, port in ((12, source), (16, to))]
        flags, data = packet[start + 13], packet[start + (packet[start + 12] >> 4) * 4 : whole]
        if flags & 18 == 2:  # SYN alone
            streams[ends[0], ends[1]] = {}
        elif data and sum(map(len, streams.get((ends[0], ends[1]), {0: b"x" * MOST}).values())) < MOST:
            streams[ends[0], ends[1]][number] = data
    found: dict[str, list[str]] = {}
    for (_, place), pieces in streams.items():
        found.setdefault(place, []).append(b"".join(pieces[n] for n in sorted(pieces)).hex())
    return found


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        print(json.dumps(overhear()))
        sys.exit()
    os.nice(10)
    stranger = Stranger(sys.argv[1])
    stranger.run()
    print(json.dumps(stranger.told))
