"""The small sender that travels to hosts to measure a link: standard library only, Python >= 3.8, fed on stdin.

A listener binds to data addresses only; both ends prove that they know the run's secret before anything is measured.
Frames have a fixed size, every socket a timeout, every stream a cap, and the whole program a deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from typing import Any

ROUND_TRIPS = 200
PING_BYTES = 64
CHUNK = 1 << 20
MAX_BYTES = 1 << 36  # per stream, whatever the clock says
STREAMS = 4
NONCE = 16
FRAME = struct.Struct("!cd")  # what to do (p: echo, s: swallow, g: give), for how many seconds
COUNT = struct.Struct("!Qd")  # bytes taken, seconds it took


def main(request: str) -> None:
    """Be the listener or the caller that the request (JSON) asks for; print JSON lines; leave at the deadline."""
    asked = json.loads(request)
    watchdog = threading.Timer(asked["deadline_s"], os._exit, [3])
    watchdog.daemon = True
    watchdog.start()
    secret = bytes.fromhex(asked["secret"])
    if "listen" in asked:
        listen(asked["listen"], secret)
    else:
        say({"rails": measure(asked, secret)})


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def listen(addresses: list[str], secret: bytes) -> None:
    """Serve on each address, say the ports, and go on until the deadline or until stdin ends."""
    ports = []
    for address in addresses:
        server = socket.create_server((address, 0), family=family(address), backlog=2 * STREAMS)
        ports.append(server.getsockname()[1])
        threading.Thread(target=accept, args=(server, secret), daemon=True).start()
    say({"ports": ports})
    sys.stdin.read()
    os._exit(0)  # threads that wait for callers are left where they are


def accept(server: socket.socket, secret: bytes) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return  # it was closed
        threading.Thread(target=serve, args=(sock, secret), daemon=True).start()


def serve(sock: socket.socket, secret: bytes) -> None:
    try:
        sock.settimeout(10.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove(sock, secret, b"listener", b"caller")
        what, seconds = FRAME.unpack(read(sock, FRAME.size))
        seconds = min(max(seconds, 0.0), 10.0)
        if what == b"p":
            for _ in range(ROUND_TRIPS):
                sock.sendall(read(sock, PING_BYTES))
        elif what == b"s":
            sock.sendall(COUNT.pack(*swallow(sock)))
        elif what == b"g":
            give(sock, seconds)
    except (OSError, ValueError):
        pass  # a stranger, or a caller that left: nothing to tell anybody
    finally:
        sock.close()


def measure(asked: dict[str, Any], secret: bytes) -> list[dict[str, Any]]:
    """Each rail alone (latency, then both directions), then, where there are several, all of them together."""
    seconds = asked["seconds"]
    found: list[dict[str, Any]] = []
    for rail in asked["rails"]:
        try:
            found.append(
                {
                    "latency_s": latency(call(rail, secret)),
                    "send": streams([rail], secret, b"s", seconds),
                    "receive": streams([rail], secret, b"g", seconds),
                }
            )
        except (OSError, ValueError) as error:
            found.append({"problem": str(error) or type(error).__name__})
    good = [rail for n, rail in enumerate(asked["rails"]) if "problem" not in found[n]]
    if len(good) > 1:
        together = {"together": len(good), "send": streams(good, secret, b"s", seconds)}
        found.append({**together, "receive": streams(good, secret, b"g", seconds)})
    return found


def call(rail: dict[str, Any], secret: bytes) -> socket.socket:
    source = (rail["source"], 0) if rail["source"] else None
    sock = socket.create_connection((rail["address"], rail["port"]), timeout=5.0, source_address=source)
    sock.settimeout(15.0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    prove(sock, secret, b"caller", b"listener")
    return sock


def prove(sock: socket.socket, secret: bytes, me: bytes, them: bytes) -> None:
    """Both ends show that they hold the secret, without sending it. Raises ValueError for one that does not."""
    mine = secrets.token_bytes(NONCE)
    sock.sendall(mine)
    theirs = read(sock, NONCE)
    sock.sendall(hmac.new(secret, me + theirs, hashlib.sha256).digest())
    if not hmac.compare_digest(read(sock, 32), hmac.new(secret, them + mine, hashlib.sha256).digest()):
        raise ValueError("the other end does not know the secret of this run")


def latency(sock: socket.socket) -> float:
    """Half the median round trip of small messages, in seconds."""
    payload, times = b"x" * PING_BYTES, []
    with sock:
        sock.sendall(FRAME.pack(b"p", 0.0))
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            sock.sendall(payload)
            read(sock, PING_BYTES)
            times.append(time.perf_counter() - begin)
    return statistics.median(times) / 2


def streams(rails: list[dict[str, Any]], secret: bytes, what: bytes, seconds: float) -> float:
    """Bytes per second of STREAMS connections per rail, all at once. Raises OSError when one of them fails."""
    results: list[tuple[int, float]] = []
    problems: list[BaseException] = []

    def one(rail: dict[str, Any]) -> None:
        try:
            with call(rail, secret) as sock:
                sock.sendall(FRAME.pack(what, seconds))
                if what == b"g":
                    results.append(swallow(sock))
                    return
                give(sock, seconds)
                sock.shutdown(socket.SHUT_WR)
                results.append(COUNT.unpack(read(sock, COUNT.size)))
        except (OSError, ValueError) as error:
            problems.append(error)

    threads = [threading.Thread(target=one, args=(rail,)) for rail in rails for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise OSError(str(problems[0]))
    return sum(count for count, _ in results) / max(took for _, took in results)


def give(sock: socket.socket, seconds: float) -> None:
    payload, end, sent = memoryview(bytearray(CHUNK)), time.monotonic() + seconds, 0
    while time.monotonic() < end and sent < MAX_BYTES:
        sent += sock.send(payload)


def swallow(sock: socket.socket) -> tuple[int, float]:
    """What came until the other end stopped, and the seconds from its first byte to its last."""
    buffer, count, begin, last = memoryview(bytearray(CHUNK)), 0, 0.0, 0.0
    while count < MAX_BYTES:
        got = sock.recv_into(buffer)
        last = time.perf_counter()
        begin = begin or last
        if not got:
            break
        count += got
    return count, max(last - begin, 1e-6)


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ValueError("the other end closed the connection")
        data += part
    return data


def family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
