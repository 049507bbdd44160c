"""An engine without a thread of its own, as for peer copies: first contact ends because the other end serves."""

from __future__ import annotations

import ctypes
import mmap
import time
from multiprocessing.queues import Queue
from typing import Any

import pytest
import torch.multiprocessing as mp

from hetctl.comm.bridge.engines import shared
from hetctl.comm.bridge.engines.base import Memory, Wires

SIZE, SECONDS = 1 << 20, 30.0


def one_end(
    rank: int, serves: bool, mine: Queue[Any], theirs: Queue[Any], said: Queue[Any], seconds: float = SECONDS
) -> None:
    """Rank 1 writes into rank 0's memory, then rank 0 into rank 1's; each says whether its write ended."""
    engine = shared.start("nixl", Wires(local=True))
    held = mmap.mmap(-1, SIZE)
    held[:4] = b"%04d" % rank
    region = engine.register(Memory(ctypes.addressof(ctypes.c_char.from_buffer(held)), SIZE))
    theirs.put((dict(region.descriptor), region.memory.address))
    descriptor, address = mine.get(timeout=SECONDS)
    peer = engine.connect(descriptor)
    for writer in (1, 0):
        end = time.monotonic() + seconds
        if writer == rank:
            handle = engine.post(peer, region, 0, there=address + 4096, nbytes=4096, write=True)
            while not (ended := engine.poll(handle)) and time.monotonic() < end:
                time.sleep(1e-4)
            engine.drop(handle)
            said.put((rank, ended))
            theirs.put("written")
        while writer != rank and mine.empty():
            if serves:
                engine.serve()
            time.sleep(1e-3)
        if writer != rank:
            mine.get()
            said.put((rank, held[4096:4100]))
    theirs.put("over")
    mine.get(timeout=SECONDS)
    engine.deregister(region)
    engine.close()


def outcome(serves: bool, seconds: float) -> list[Any]:
    if not shared.installed("nixl"):
        pytest.skip("nixl is not installed: pip install hetctl[nixl]")
    context = mp.get_context("spawn")
    to, said = [context.Queue(), context.Queue()], context.Queue()
    ends = [context.Process(target=one_end, args=(r, serves, to[r], to[1 - r], said, seconds)) for r in (0, 1)]
    for process in ends:
        process.start()
    found = [said.get(timeout=3 * SECONDS) for _ in range(4)]
    for process in ends:
        process.join(SECONDS)
        assert process.exitcode == 0
    return sorted(found, key=str)


def test_the_first_contact_ends_where_the_other_end_serves() -> None:
    assert outcome(True, SECONDS) == [(0, True), (0, b"0001"), (1, True), (1, b"0000")]


def test_nobody_serving_is_why_ends_take_turns() -> None:
    assert (1, False) in outcome(False, 2.0)
