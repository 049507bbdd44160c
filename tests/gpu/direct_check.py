"""The direct bridge between two GPUs of one host, over NIXL: contents, what was staged, by which protocol, how fast.

`PYTHONPATH=. python tests/gpu/direct_check.py` takes a minute or two and prints one JSON document. NIXL comes by pip,
or as a folder that tests/gpu/pack_nixl.py made, on PYTHONPATH. Between GPUs of one host the engine takes the
driver's peer copy: that is what the evidence must call it, and no result here says anything about RDMA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from hetctl.comm.bench import exact, measure
from hetctl.comm.bridge.device_memory import allocate
from hetctl.comm.contract import variables
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.operation.recorder import METER

MIB = 2**20
SECONDS = 240
ISLANDS = (PlacedIsland("one", "nvidia", "nccl", (0,)), PlacedIsland("other", "nvidia", "nccl", (1,)))


def bridged(rank: int, folder: Path, engine: str, verify: bool) -> dict[str, Any]:
    """Messages and sums over `het`, then their rate; what the engine said at its end."""
    bridges = (PlacedBridge(("one", "other"), "direct"),)
    placement = Placement(ISLANDS, bridges, hosts=("here", "here"), verify_bridge=verify)
    (folder / f"placement-{rank}.json").write_text(placement.to_json())
    events = os.open(folder / f"events-{rank}", os.O_RDWR | os.O_CREAT)
    os.environ.update({variables.PLACEMENT: str(folder / f"placement-{rank}.json"), variables.EVENTS: str(events)})
    os.environ["HETCTL_ENGINE"] = engine
    from hetctl.comm.group.autoload import register

    register()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("het", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=SECONDS / 2))
    device, found = torch.device("cuda", rank), dict[str, Any]()
    for count in (1, 1000, 3 * MIB + 1, 64 * MIB):
        want = torch.arange(count, device=device, dtype=torch.int32)
        if rank == 0:
            dist.send(want, 1)
            dist.recv(got := torch.zeros_like(want), 1)
            assert torch.equal(got, want + 1), count
        else:
            dist.recv(got := torch.zeros_like(want), 0)
            assert torch.equal(got, want), count
            dist.send(got + 1, 0)
    for count in (7, 4 * MIB + 3):
        total = torch.full((count,), rank + 1.0, device=device)
        dist.all_reduce(total)
        assert total.unique().tolist() == [3.0], count
    found["contents"] = "right"
    group = dist.group.WORLD
    ends = exact.Ends(group, rank, 2, device)
    touched = METER.touched
    found["bytes_per_s_64MiB"] = measure.message_rate(ends, 64 * MIB)
    found["bytes_per_s_1MiB"] = measure.message_rate(ends, MIB)
    found["all_reduce_bytes_per_s_256MiB"] = 256 * MIB / measure.all_reduce_seconds(ends, 256 * MIB)
    # the barriers around the messages are sums of a host tensor: a few bytes
    found["host_bytes_touched_by_messages"] = METER.touched - touched
    dist.destroy_process_group()
    lines = (folder / f"events-{rank}").read_text().splitlines()
    found["evidence"] = [e for e in map(json.loads, lines) if e["event"] == "bridge"]
    return found


def raw(rank: int, folder: Path, engine: str, verify: bool) -> dict[str, Any]:
    """The engine alone: writes of 64 MiB between two registered tensors, one after another and three in flight."""
    from hetctl.comm.bridge.engines.base import Memory, Wires
    from hetctl.comm.bridge.engines.shared import start

    torch.cuda.set_device(rank)
    running = start(engine, Wires(local=True))  # type: ignore[arg-type]
    data = allocate(192 * MIB, torch.device("cuda", rank)).fill_(7 - 7 * rank)
    torch.cuda.synchronize()
    region = running.register(Memory(data.data_ptr(), data.numel(), rank))
    store = dist.FileStore(str(folder / "raw"), 2)
    if rank == 1:
        store.set("target", json.dumps([dict(region.descriptor), data.data_ptr()]))
        while not store.check(["done"]):
            running.serve()
            time.sleep(1e-3)
        torch.cuda.synchronize()
        found: dict[str, Any] = {"contents": "right" if bool((data == 7).all()) else "WRONG"}
    else:
        store.wait(["target"], timedelta(seconds=SECONDS))
        descriptor, address = json.loads(store.get("target"))
        peer = running.connect(descriptor)

        def seconds(depth: int, count: int) -> float:
            """Of `count` writes, `depth` of them under way at once, asked for without a pause."""
            began, flying = time.perf_counter(), list[Any]()
            for number in range(count + depth):
                if len(flying) == depth or number >= count:
                    while flying and not running.poll(flying[0]):
                        pass
                    if flying:
                        running.drop(flying.pop(0))
                if number < count:
                    at = number % 3 * 64 * MIB
                    flying.append(running.post(peer, region, at, there=address + at, nbytes=64 * MIB, write=True))
            return time.perf_counter() - began

        for depth in (3, 1):
            seconds(depth, 20)
        found = {"bytes_per_s_64MiB": 64 * MIB * 400 / seconds(1, 400)}
        found["bytes_per_s_64MiB_three_in_flight"] = 64 * MIB * 400 / seconds(3, 400)
        store.set("done", "1")
    running.deregister(region)
    running.close()
    return {**found, "evidence": asdict(running.evidence())}


def plain(rank: int, folder: Path, engine: str, verify: bool, thread: bool = True) -> dict[str, Any]:
    """NIXL as a stranger to this project uses it: its own Python API, PyTorch's memory, one handle asked for again."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(str(rank), nixl_agent_config(backends=["UCX"], enable_prog_thread=thread))
    data = torch.full((64 * MIB,), 7 - 7 * rank, dtype=torch.uint8, device=f"cuda:{rank}")
    torch.cuda.synchronize()
    where = [(data.data_ptr(), data.numel(), rank)]
    agent.register_memory([(*where[0], "")], "VRAM")
    mine = agent.get_xfer_descs(where, "VRAM")
    store = dist.FileStore(str(folder / "plain"), 2)
    if rank == 1:
        store.set("agent", agent.get_agent_metadata())
        store.set("where", agent.get_serialized_descs(mine))
        while not store.check(["done"]):
            agent.get_new_notifs()  # without a thread, what the first contact needs
            time.sleep(1e-3)
        torch.cuda.synchronize()
        return {"contents": "right" if bool((data == 7).all()) else "WRONG"}
    store.wait(["agent", "where"], timedelta(seconds=SECONDS))
    peer = agent.add_remote_agent(store.get("agent"))
    handle = agent.initialize_xfer("WRITE", mine, agent.deserialize_descs(store.get("where")), peer)

    def write() -> None:
        state = agent.transfer(handle)
        while state != "DONE":
            assert state != "ERR", "the engine failed"
            state = agent.check_xfer_state(handle)

    for _ in range(20):
        write()
    began = time.perf_counter()
    for _ in range(400):
        write()
    rate = 400 * data.numel() / (time.perf_counter() - began)
    store.set("done", "1")
    return {"bytes_per_s_64MiB": rate}


def unthreaded(rank: int, folder: Path, engine: str, verify: bool) -> dict[str, Any]:
    """The same without NIXL's progress thread, as its own benchmark runs and, since it halves peer copies, we do."""
    return plain(rank, folder, engine, verify, thread=False)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "raw": raw,
    "plain": plain,
    "unthreaded": unthreaded,
    "bridged": bridged,
}


def run(part: str, engine: str, verify: bool) -> list[Any]:
    """The part on both GPUs, a process each; killed when its time is over."""
    with tempfile.TemporaryDirectory() as made:
        context = mp.get_context("spawn")
        folder = Path(made)
        both = [context.Process(target=_rank, args=(part, r, folder, engine, verify), daemon=True) for r in (0, 1)]
        for process in both:
            process.start()
        end = time.monotonic() + SECONDS
        for process in both:
            process.join(max(0.1, end - time.monotonic()))
            process.kill()
        files = [folder / f"{part}-{r}.json" for r in (0, 1)]
        return [json.loads(f.read_text()) if f.exists() else "it did not end in time" for f in files]


def _rank(part: str, rank: int, folder: Path, engine: str, verify: bool) -> None:
    torch.cuda.set_device(rank)
    try:
        found: Any = PARTS[part](rank, folder, engine, verify)
    except Exception:
        found = traceback.format_exc()[-3000:]
    (folder / f"{part}-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # how an engine ends a process is not what is checked here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="nixl")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for number in range(options.rounds):
        parts = [part for part in PARTS if part not in ("plain", "unthreaded") or options.engine == "nixl"]
        ends = {part: run(part, options.engine, False) for part in parts}
        found |= {f"{part} {number}": both for part, both in ends.items()}
        with contextlib.suppress(TypeError, KeyError):  # one of them failed: its words are in `found`
            rates = {part: both[0]["bytes_per_s_64MiB"] for part, both in ends.items()}
            ours = rates.pop("bridged")
            beside = [f"{ours / rate:.3f} of {part}'s {rate / 1e9:.1f}" for part, rate in rates.items()]
            print(f"round {number}: {ours / 1e9:.1f} GB/s: {', '.join(beside)}", file=sys.stderr)
    found["bridged, checksums"] = run("bridged", options.engine, True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
