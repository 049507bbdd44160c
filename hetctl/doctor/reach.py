"""The small program that travels to hosts to try whether they reach each other: standard library only, Python >= 3.8.

Each host listens on its data address at a port of the range that runs use, then calls all others. It answers nobody
but callers that know the secret, moves no data, and is gone at the deadline or when its stdin ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

TIMEOUT_S = 3.0
AT_ONCE = 16


def main(request: str) -> None:
    """Listen, say the port; then for every JSON line on stdin do what it asks and say the results."""
    asked = json.loads(request)
    watchdog = threading.Timer(asked["deadline_s"], os._exit, [3])
    watchdog.daemon = True
    watchdog.start()
    say(listen(asked["address"], asked["ports"], asked["secret"]))
    for line in sys.stdin:
        work = json.loads(line)
        if "call" in work:
            say({"results": at_once(partial(call, secret=asked["secret"]), work["call"])})
        elif "trace" in work:
            say({"results": at_once(trace, work["trace"])})
        elif "write" in work:
            say(write(work["write"], work["token"]))
        elif "look" in work:
            say(look(work["look"], work["token"]))
        elif "forget" in work:
            say(forget(work["forget"], work["token"]))
    os._exit(0)


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def listen(address: str, ports: list[int], secret: str) -> dict[str, Any]:
    """The first free port of the range on this address; why there is none otherwise."""
    problem = "the range is empty"
    for port in range(ports[0], ports[1] + 1):
        try:
            server = socket.create_server((address, port), family=family(address), backlog=64)
        except OSError as error:
            problem = f"{address}:{port}: {error.strerror or error}"
            if error.errno != errno.EADDRINUSE:
                break
            continue
        threading.Thread(target=serve, args=(server, secret), daemon=True).start()
        return {"port": server.getsockname()[1]}
    return {"problem": problem}


def serve(server: socket.socket, secret: str) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(sock, secret), daemon=True).start()


def answer(sock: socket.socket, secret: str) -> None:
    with contextlib.suppress(OSError), sock:
        sock.settimeout(TIMEOUT_S)
        sock.sendall(proof(secret, sock.recv(16)))


def proof(secret: str, challenge: bytes) -> bytes:
    return hashlib.sha256(secret.encode() + challenge).digest()


def at_once(work: Callable[[dict[str, Any]], dict[str, Any]], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What comes of every item, a few at a time."""
    results: list[dict[str, Any]] = [{} for _ in items]
    waiting = list(range(len(items)))

    def run() -> None:
        while waiting:
            with contextlib.suppress(IndexError):
                number = waiting.pop()
                results[number] = work(items[number])

    threads = [threading.Thread(target=run) for _ in range(min(AT_ONCE, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def call(target: dict[str, Any], secret: str) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": "", "alive": False}
    try:
        challenge = os.urandom(16)
        with socket.create_connection((target["address"], target["port"]), timeout=TIMEOUT_S) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.sendall(challenge)
            said = b""
            while len(said) < 32:
                part = sock.recv(32 - len(said))
                if not part:
                    break
                said += part
            if said != proof(secret, challenge):
                found["problem"] = "somebody else answers there"
    except OSError as error:
        found["alive"] = isinstance(error, ConnectionRefusedError) or anything(target["address"])
        found["problem"] = "no answer within 3 s" if isinstance(error, socket.timeout) else error.strerror or str(error)
    if target.get("mtu") and not found["problem"]:
        found["largest_packet"] = ping(target["address"], target["mtu"])
    return found


def anything(address: str) -> bool:
    """Whether the host answers at all at this address: its SSH port accepts or refuses."""
    try:
        socket.create_connection((address, 22), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def ping(address: str, mtu: int) -> bool | None:
    """Whether a packet of the whole MTU passes without being cut up; None where there is no ping to ask."""
    tool = shutil.which("ping")
    if tool is None:
        return None
    overhead = 48 if ":" in address else 28

    def passes(size: int) -> bool:
        argv = [tool, "-M", "do", "-c", "1", "-W", "2", "-s", str(size), address]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return done.returncode == 0

    if passes(mtu - overhead):
        return True
    return False if passes(56) else None  # nobody answers pings here: nothing is known


def trace(way: dict[str, Any]) -> dict[str, str]:
    """What two tools print of the way between two LIDs."""
    of_port = ["-C", str(way["device"]), "-P", str(way["port"])]
    ends = str(way["from"]), str(way["to"])
    return {
        "route": printed(["ibtracert", *of_port, *ends]),
        "record": printed(["saquery", *of_port, "--src-to-dst", ":".join(ends)]),
    }


def printed(argv: list[str]) -> str:
    tool = shutil.which(argv[0], path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if tool is None:
        return argv[0] + " is not installed"
    try:
        done = subprocess.run(
            [tool, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return argv[0] + " gave no answer within 3 s"
    return done.stdout[:16384].decode("utf-8", "replace")


def write(folder: str, token: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, f".hetctl-shared-{token[:16]}"), "x", encoding="ascii") as file:
            file.write(token)
        return {"problem": ""}
    except OSError as error:
        return {"problem": error.strerror or str(error)}


def look(folder: str, token: str) -> dict[str, Any]:
    path = os.path.join(folder, f".hetctl-shared-{token[:16]}")
    try:
        os.listdir(folder)  # makes a network file system look again
        with open(path, encoding="ascii") as file:
            return {"problem": "" if file.read() == token else "stale content"}
    except FileNotFoundError:
        return {"problem": "absent"}
    except OSError as error:
        return {"problem": error.strerror or str(error)}


def forget(folder: str, token: str) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, f".hetctl-shared-{token[:16]}"))
    return {"problem": ""}


def family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
