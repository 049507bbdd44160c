"""Whether an engine works here, tried in a process of its own: one that fails to start may take its process with it.

`python -m hetctl.comm.engines.probe` reads {engine, wires, device} as JSON on stdin; the last line of its output is
{"host": why not, "device": why not}, '' where memory was registered and a transfer to itself arrived.
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
from collections.abc import Callable
from functools import cache

from hetctl.comm.engines.base import Engine, EngineName, Memory, Wires
from hetctl.comm.engines.shared import PACKAGES, installed, start
from hetctl.comm.values import decode, encode

SECONDS = 300.0  # a machine under load takes long to load an engine
_BYTES = 64 * 1024
_trying = threading.Lock()  # groups are made side by side


def ability(engine: EngineName, wires: Wires, device: int | None) -> tuple[str, str]:
    """Why host memory and why device memory cannot be used with an engine here; '' where they can. Tried once."""
    with _trying:
        return _ability(engine, wires, device)


@cache
def _ability(engine: EngineName, wires: Wires, device: int | None) -> tuple[str, str]:
    if not installed(engine):
        why = f"no {engine} here (pip install 'hetctl[{engine}]')"
        return why, why
    asked = json.dumps({"engine": engine, "wires": encode(wires), "device": device})
    child = subprocess.Popen(
        [sys.executable, "-m", "hetctl.comm.engines.probe"],
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
        return (f"{engine} did not start within {SECONDS:g} s",) * 2
    return _read(engine, said, child.returncode)


def _read(engine: EngineName, said: str, code: int) -> tuple[str, str]:
    lines = said.strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
        return str(found["host"]), str(found["device"])
    except (ValueError, KeyError, TypeError):
        ended = f"signal {-code}" if code < 0 else f"code {code}"
        why = f"{PACKAGES[engine]} ended with {ended} when it was tried: {lines[-1][:160]}"
        return why, why


def main() -> None:
    asked = json.load(sys.stdin)
    engine_name, device = asked["engine"], asked["device"]
    found = {"host": "", "device": "no device was asked for"}
    if device is None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would load it, for seconds, and can do without
    try:
        engine = start(engine_name, decode(Wires, asked["wires"], where="wires"))
    except Exception as error:  # the process's boundary: it becomes the answer
        found["host"] = found["device"] = str(error)
    else:
        found["host"] = _tried(lambda: _host(engine))
        if device is not None:
            found["device"] = found["host"] or _tried(lambda: _device(engine, device))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # the engine's own end is not what was asked


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

    torch.cuda.set_device(device)
    held = torch.zeros(2 * _BYTES, dtype=torch.uint8, device="cuda")
    held[:_BYTES] = 0x5A
    torch.cuda.synchronize()
    _to_itself(engine, Memory(held.data_ptr(), 2 * _BYTES, device))
    return "" if bool((held == 0x5A).all()) else "a transfer to itself changed its bytes"


def _to_itself(engine: Engine, memory: Memory) -> None:
    """Write the first half of a region over its second half, through the engine."""
    region = engine.register(memory)
    handle = engine.post_write(engine.connect(region.descriptor), region, 0, to=memory.address + _BYTES, nbytes=_BYTES)
    end = time.monotonic() + 20
    while not engine.poll(handle):
        if time.monotonic() > end:
            raise TimeoutError("a transfer to itself did not end")
        time.sleep(0.001)
    engine.drop([handle])
    engine.deregister(region)


if __name__ == "__main__":
    main()
