"""The adapter between two processes without any `het`: who serves a write, and which memory is refused.

oneside.py target ENGINE PORTS ADDRESS       registers /dev/shm/target, says "warm" after a first write, and waits
oneside.py writer ENGINE PORTS ADDRESS PEER  writes ones; after a line on stdin nines; after another, to nobody any more
oneside.py bar ENGINE PORTS ADDRESS         tries to register the memory of a PCI device, as a GPU's BAR is
"""

from __future__ import annotations

import ctypes
import glob
import json
import mmap
import os
import socket
import sys
import time
from pathlib import Path

from hetctl.comm.bridge.engines.base import CannotRegister, EngineFailed, Memory, Wire, Wires
from hetctl.comm.bridge.engines.shared import start

BYTES, PORT = 1 << 20, 7400
SPARE = ("0x1005\n", "0x1044\n")  # the machine's random number device


def main(role: str, engine: str, ports: str, address: str, *peer: str) -> None:
    running = start(engine, Wires(tuple(Wire(port, 1) for port in ports.split(",")), address))  # type: ignore[arg-type]
    {"target": target, "writer": writer, "bar": bar}[role](running, *peer)
    sys.stdout.flush()
    os._exit(0)


def mapped(file: str, size: int = BYTES) -> tuple[mmap.mmap, int]:
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    if file.startswith("/dev/shm"):
        os.ftruncate(fd, size)
    held = mmap.mmap(fd, size)
    return held, ctypes.addressof(ctypes.c_char.from_buffer(held))


def target(engine) -> None:  # type: ignore[no-untyped-def]
    held, address = mapped("/dev/shm/target")
    region = engine.register(Memory(address, BYTES))
    with socket.create_server(("", PORT)) as server:
        channel, _ = server.accept()
    channel.sendall(json.dumps([dict(region.descriptor), address]).encode() + b"\n")
    channel.recv(1)
    print("warm", set(held[:]) == {1}, flush=True)
    time.sleep(1000)


def writer(engine, peer: str) -> None:  # type: ignore[no-untyped-def]
    held, address = mapped("/dev/shm/writer")
    region = engine.register(Memory(address, BYTES))
    channel = reach(peer)
    descriptor, remote = json.loads(channel.makefile().readline())
    there = engine.connect(descriptor)
    held[:] = b"\x01" * BYTES
    move(engine, there, region, remote)
    channel.sendall(b"w")
    print("asking", flush=True)
    sys.stdin.readline()
    held[:] = b"\x09" * BYTES
    move(engine, there, region, remote)
    print("written", flush=True)
    sys.stdin.readline()
    try:
        move(engine, there, region, remote)
        print("nobody noticed", flush=True)
    except EngineFailed as error:
        print("lost:", error, flush=True)
    engine.deregister(region)
    print("registered", engine.evidence().registered, flush=True)
    sys.stdin.readline()


def reach(peer: str) -> socket.socket:
    for _ in range(600):
        try:
            return socket.create_connection((peer, PORT), 2)
        except OSError:
            time.sleep(0.5)
    raise SystemExit("nobody there")


def move(engine, peer, region, remote: int) -> None:  # type: ignore[no-untyped-def]
    handle = engine.post(peer, region, 0, there=remote, nbytes=BYTES, write=True)
    end = time.monotonic() + 60
    while not engine.poll(handle):
        assert time.monotonic() < end, "the write does not end"
        time.sleep(0.001)
    engine.drop(handle)


def bar(engine) -> None:  # type: ignore[no-untyped-def]
    """Host memory first, so that a refusal means the memory and not the engine."""
    _, address = mapped("/dev/shm/plain")
    print("host memory", bool(engine.register(Memory(address, BYTES))), flush=True)
    folder = next(p for p in map(Path, glob.glob("/sys/bus/pci/devices/*")) if (p / "device").read_text() in SPARE)
    if (folder / "driver").exists():  # a driver's own memory is not handed out
        (folder / "driver" / "unbind").write_text(folder.name)
    (folder / "enable").write_text("1")
    file = str(folder / "resource4")
    size = os.path.getsize(file)
    _, address = mapped(file, size)
    try:
        engine.register(Memory(address, size))
        print("device memory was taken", flush=True)
    except CannotRegister as error:
        print("refused:", error, flush=True)


main(*sys.argv[1:])
