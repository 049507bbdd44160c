"""The direct bridge over each installed engine, on its own sockets: what arrives, what is refused, what is left."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge import forwarded, staging
from hetctl.comm.bridge.engines import shared
from hetctl.comm.bridge.engines.base import CannotRegister, Engine, EngineName, Memory, Wires
from hetctl.comm.bridge.staging import seal
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.placement import PlacedBridge
from tests.busy import busy
from tests.comm.spawn import on_islands

RDMA = (PlacedBridge(("island0", "island1"), "rdma"),)


@pytest.fixture(params=shared.ENGINES)
def engine(request: pytest.FixtureRequest) -> EngineName:
    if not shared.installed(request.param):
        pytest.skip(f"{request.param} is not installed: pip install hetctl[{request.param}]")
    name: EngineName = request.param
    return name


def run(
    engine: EngineName, sizes: tuple[int, ...], body: Any, *args: Any, initiator: str = "", rails: int = 1, **more: Any
) -> list[Any]:
    variables = {"HETCTL_RDMA": ",".join(["sockets"] * rails), "HETCTL_ENGINE": engine, "HETCTL_INITIATOR": initiator}
    return on_islands(sizes, body, *args, bridges=RDMA, verify_bridge=True, variables=variables, seconds=90, **more)


def exchanged(rank: int) -> list[Any]:
    """Messages of three chunks and a bit both ways at once, of nothing, and sums of many sizes; what was taken."""
    peer, count = 1 - rank, (13 << 20) // 4 + 7
    out, back = torch.arange(count, dtype=torch.float32) + rank, torch.empty(count)
    works = [dist.isend(out, peer), dist.irecv(back, peer)]
    for work in works:
        work.wait()
    assert torch.equal(back, torch.arange(count, dtype=torch.float32) + peer)
    for size in (0, 1, 1 << 18, 5 << 20):
        total = torch.full((size,), rank + 1, dtype=torch.int64)
        dist.all_reduce(total)
        assert total.numel() == 0 or total.unique().tolist() == [3]
    (held,) = shared._held.values()
    return [rail.engine.evidence() for rail in held.rails]


@pytest.mark.parametrize("initiator", ["sender", "receiver", "lower"])
def test_messages_and_sums_arrive(engine: EngineName, initiator: str) -> None:
    for (evidence,) in run(engine, (1, 1), exchanged, initiator=initiator):
        assert evidence.registered >= 3  # a ring for each lane that was used


def test_chunks_take_all_rails_in_turn(engine: EngineName) -> None:
    for found in run(engine, (1, 1), exchanged, rails=2):
        assert [evidence.written_bytes > 8 << 20 for evidence in found] == [True, True]
        assert found[0].registered == found[1].registered >= 3


def summed(rank: int) -> float:
    total = torch.full((3 << 20,), float(rank + 1))
    dist.all_reduce(total)
    return float(total.sum() / total.numel())


def test_sums_across_unequal_islands(engine: EngineName) -> None:
    assert run(engine, (2, 1), summed) == [6.0, 6.0, 6.0]


def flipped(rank: int) -> str:
    """The error of a message of two chunks, the second of which changes on its way."""
    data = torch.arange(7 << 20, dtype=torch.uint8)

    def harmful(slot: torch.Tensor, position: tuple[int, int], length: int, *, checked: bool) -> None:
        seal(slot, position, length, checked=checked)
        if position[1] == 1:
            slot[100] ^= 1

    if rank == 0:
        forwarded.seal = harmful
    try:
        dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_a_flip_on_the_way_names_ring_peer_and_chunk_to_both_ends(engine: EngineName) -> None:
    for text in run(engine, (1, 1), flipped, broken=True):
        assert "the rdma ring" in text
        assert "receiving from rank 0 on host0" in text
        assert "chunk 1 of message 0 arrived with other bytes" in text


def answers_first(rank: int) -> bool:
    """Rank 0's second message waits for the device, which waits for rank 1's answer to the first one."""
    x, y, answer = torch.zeros(1 << 20), torch.ones(1 << 20), torch.ones(1)
    if rank == 1:
        for got in (x.clone(), y.clone()):
            dist.recv(got, 0)
            dist.send(answer, 0)
        return bool((got == 1).all())
    answered, copies, true_out = threading.Event(), list[Any](), staging.CopyEngine.out

    class Behind:
        def query(self) -> bool:
            return answered.is_set()

        def synchronize(self) -> None:
            assert answered.wait(30), "the first message was not announced"

    def out(self: Any, *args: Any) -> Any:
        copies.append(true_out(self, *args))
        return Behind() if len(copies) == 2 else copies[-1]

    staging.CopyEngine.out = out  # type: ignore[method-assign]
    works = [dist.isend(x, 1), dist.isend(y, 1)]
    dist.recv(answer, 1)
    answered.set()
    dist.recv(answer, 1)
    return len(works) == 2


def test_what_has_arrived_is_told_while_the_next_copy_waits(engine: EngineName) -> None:
    assert run(engine, (1, 1), answers_first) == [True, True]


def bereaved(rank: int) -> tuple[str, float, int]:
    """Rank 1 dies between two large messages; the error of rank 0, after how long, and what is registered then."""
    group = dist.new_group(timeout=timedelta(seconds=40))
    data = torch.ones(64 << 20, dtype=torch.uint8)
    dist.send(data[:1024], 1, group=group) if rank == 0 else dist.recv(data[:1024], 0, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, said = time.monotonic(), "nothing was noticed"
    try:
        for _ in range(20):
            dist.send(data, 1, group=group)
    except RuntimeError as error:
        said = str(error)
    seconds = time.monotonic() - began
    held = next(iter(shared._held.values())).rails[0].engine
    dist.destroy_process_group(group)
    return said, seconds, held.evidence().registered


def test_a_dead_peer_is_named_soon_and_no_registration_is_left(engine: EngineName) -> None:
    said, seconds, registered = run(engine, (1, 1), bereaved, lost=(1,))[0]
    assert "send to rank 1 on host1 failed" in said
    assert "no answer from rank 1" in said
    assert seconds < 20 * busy()
    assert registered == 0


def offers(engine: EngineName, folder: Path) -> None:
    """Registers a file's memory, says where it is, and does nothing more."""
    file, running = np.memmap(folder / "memory", np.uint8, "r+"), shared.start(engine, Wires(sockets=True))
    region = running.register(Memory(file.ctypes.data, file.size))
    write_json(folder / "descriptor", [dict(region.descriptor), file.ctypes.data])
    time.sleep(1000)


def moved(running: Engine, handle: Any, *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (over := running.poll(handle)) and time.monotonic() < end:
        time.sleep(0.01)
    return over


def test_over_sockets_a_stopped_process_receives_nothing(engine: EngineName, tmp_path: Path) -> None:
    """The counter-proof of the RDMA rig's, where a stopped process's memory is written all the same."""
    there = np.memmap(tmp_path / "memory", np.uint8, "w+", shape=(8 << 20,))
    target = mp.get_context("spawn").Process(target=offers, args=(engine, tmp_path), daemon=True)
    target.start()
    running = shared.start(engine, Wires(sockets=True))
    data = torch.ones(there.size, dtype=torch.uint8)
    region = running.register(Memory(data.data_ptr(), data.numel()))
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "descriptor").exists():
            assert time.monotonic() < end
            assert target.is_alive()
            time.sleep(0.05)
        descriptor, address = json.loads((tmp_path / "descriptor").read_text())
        peer = running.connect(descriptor)
        first = running.post(peer, region, 0, there=address, nbytes=data.numel(), write=True)
        assert moved(running, first, seconds=30)
        running.drop(first)
        assert set(np.unique(there)) == {1}
        assert target.pid is not None
        os.kill(target.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
        data.fill_(9)
        second = running.post(peer, region, 0, there=address, nbytes=data.numel(), write=True)
        assert not moved(running, second, seconds=3)
        assert set(np.unique(there)) == {1}
        os.kill(target.pid, signal.SIGCONT)
        assert moved(running, second, seconds=30)
        running.drop(second)
        assert set(np.unique(there)) == {9}
    finally:
        target.kill()
        target.join()
        running.deregister(region)
        running.close()


def test_memory_that_cannot_be_registered_is_refused() -> None:
    """Addresses that are nobody's: sockets take any, so only engines that look at them refuse here."""
    if not shared.installed("mooncake"):
        pytest.skip("mooncake is not installed: pip install hetctl[mooncake]")
    running = shared.start("mooncake", Wires(sockets=True))
    region = running.register(Memory(torch.empty(4096, dtype=torch.uint8).data_ptr(), 4096))
    with pytest.raises(CannotRegister, match="Mooncake does not register 4096 bytes of host memory"):
        running.register(region.memory)  # overlapping
    running.close()
    assert running.evidence().registered == 0
