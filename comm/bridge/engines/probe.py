"""Whether an engine works here, tried in a process of its own: one that fails to start may take its process with it.

`python -m hetctl.comm.bridge.engines.probe` reads {engine, wires, device} as JSON on stdin; its last line of output is
{"host": why not, "device": why not, "lost": {port: why not}}, '' where memory was registered and a transfer to itself
arrived. Each port is tried with an engine of its own; what one of several refuses is lost, and the others are used.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from hetctl.comm.bridge.engines.base import Engine, EngineName, Memory, Wires
from hetctl.comm.bridge.engines.shared import PACKAGES, installed, start
from hetctl.comm.contract.values import decode, encode

SECONDS = 300.0  # a machine under load takes long to load an engine
_BYTES = 64 * 1024
_trying = threading.Lock()  # groups are made side by side


@dataclass(frozen=True)
class EngineTrial:
    """Why host and why device memory cannot be used with an engine here, '' where they can; ports that failed."""

    host: str
    device: str
    lost: Mapping[str, str] = field(default_factory=dict)


def ability(engine: EngineName, wires: Wires, device: int | None) -> EngineTrial:
    """What an engine can do over these wires. Tried once in a process."""
    with _trying:
        return _ability(engine, wires, device)


@cache
def _ability(engine: EngineName, wires: Wires, device: int | None) -> EngineTrial:
    if not installed(engine):
        why = f"no {engine} here (pip install 'hetctl[{engine}]')"
        return EngineTrial(why, why)
    asked = json.dumps({"engine": engine, "wires": encode(wires), "device": device})
    child = subprocess.Popen(
        [sys.executable, "-m", "hetctl.comm.bridge.engines.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(asked, SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return EngineTrial(*(f"{engine} did not start within {SECONDS:g} s",) * 2)
    return _read(engine, said, child.returncode)


def _read(engine: EngineName, said: str, code: int) -> EngineTrial:
    lines = said.strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
        return EngineTrial(str(found["host"]), str(found["device"]), dict(found["lost"]))
    except (ValueError, KeyError, TypeError):
        ended = f"signal {-code}" if code < 0 else f"code {code}"
        why = f"{PACKAGES[engine]} ended with {ended} when it was tried: {lines[-1][:160]}"
        return EngineTrial(why, why)


def main() -> None:
    asked = json.load(sys.stdin)
    engine, device = asked["engine"], asked["device"]
    if device is None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would load it, for seconds, and can do without
    each = {one.name: _one(engine, one, device) for one in decode(Wires, asked["wires"], where="wires").each()}
    print("\n" + json.dumps(_summary(each)), flush=True)
    os._exit(0)  # the engines' own end is not what was asked


def _one(engine: EngineName, wires: Wires, device: int | None) -> tuple[str, str]:
    """Why host and why device memory cannot be used over one port."""
    try:
        running = start(engine, wires)
    except Exception as error:  # the process's boundary: it becomes the answer
        return str(error), str(error)
    host = _tried(lambda: _host(running))
    if device is None:
        return host, "no device was asked for"
    return host, host or _tried(lambda: _device(running, device))


def _summary(each: Mapping[str, tuple[str, str]]) -> dict[str, object]:
    """A port that takes no host memory is lost; device memory must be taken by every other one."""
    host = {port: why for port, (why, _) in each.items() if why}
    if len(host) == len(each):
        return {"host": _first(host), "device": _first(host), "lost": {}}
    device = {port: why for port, (_, why) in each.items() if why and port not in host}
    return {"host": "", "device": _first(device), "lost": host}


def _first(whys: Mapping[str, str]) -> str:
    return next(iter(whys.values()), "")


def _tried(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except Exception as error:  # the same boundary
        return str(error)


def _host(engine: Engine) -> str:
    held = mmap.mmap(-1, 2 * _BYTES)
    held[:_BYTES] = b"\x5a" * _BYTES
    base = ctypes.addressof(ctypes.c_char.from_buffer(held))
    _to_itself(engine, Memory(base, 2 * _BYTES))
    return "" if held[_BYTES:] == held[:_BYTES] else "a transfer to itself changed its bytes"


def _device(engine: Engine, device: int) -> str:
    import torch

    from hetctl.comm.bridge.device_memory import allocate

    torch.cuda.set_device(device)
    held = allocate(2 * _BYTES, torch.device("cuda", device)).zero_()
    held[:_BYTES] = 0x5A
    torch.cuda.synchronize()
    _to_itself(engine, Memory(held.data_ptr(), 2 * _BYTES, device))
    return "" if bool((held == 0x5A).all()) else "a transfer to itself changed its bytes"


def _to_itself(engine: Engine, memory: Memory) -> None:
    """Write the first half of a region over its second half, through the engine."""
    region = engine.register(memory)
    peer, there = engine.connect(region.descriptor), memory.address + _BYTES
    handle = engine.post(peer, region, 0, there=there, nbytes=_BYTES, write=True)
    end = time.monotonic() + 20
    while not engine.poll(handle):
        if time.monotonic() > end:
            raise TimeoutError("a transfer to itself did not end")
        time.sleep(0.001)
    engine.drop(handle)
    engine.deregister(region)


if __name__ == "__main__":
    main()
