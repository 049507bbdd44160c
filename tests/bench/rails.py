"""Four shaped rails between two hosts beside one rail in the same run, all-reduce beside its bound, and a rail cut.

    python -m tests.bench.rails [--megabytes 256] [--rate 1gbit] [--rounds 3]

Hosts are network namespaces with four NICs each; the job's store lives on a fifth network. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from hetctl.comm.contract import variables
from tests.rigs import netns

ROOT = Path(__file__).resolve().parents[2]
RAILS = 4
MOST_PAUSE_S = 2.0
SIZES = (2, 2)  # ranks of the two islands, all of one island on one host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_of_job(asked.rank, json.loads(os.environ["BENCH"]))
        return
    if why_not := netns.unavailable():
        sys.exit(f"skipped: {why_not}")
    with tempfile.TemporaryDirectory() as name:
        specs = [netns.HostSpec(sshd=False)] * 2
        with netns.hosts(specs, Path(name), rails=RAILS, rate=asked.rate) as rig:
            rounds: dict[str, list[dict[str, float]]] = {"one": [], "four": []}
            for _ in range(asked.rounds):
                rounds["one"].append(job(rig, asked.megabytes, ["rail0"], cut=False))
                rounds["four"].append(job(rig, asked.megabytes, [f"rail{i}" for i in range(RAILS)], cut=False))
            lost = job(rig, asked.megabytes, [f"rail{i}" for i in range(RAILS)], cut=True)
    report(rounds, lost, asked.rate)


def job(rig: netns.Rig, megabytes: int, nics: list[str], *, cut: bool) -> dict[str, float]:
    """What rank 0 measured; with `cut`, rail 2 of the second host loses its carrier at a random moment of the sums."""
    settings = {"megabytes": megabytes, "store": rig.hosts[0].address, "folder": str(rig.home), "cut": cut}
    running = []
    for rank in range(sum(SIZES)):
        host = rig.hosts[0 if rank < SIZES[0] else 1]
        env = {"BENCH": json.dumps(settings), "GLOO_SOCKET_IFNAME": ",".join(nics), "PYTHONPATH": str(ROOT)}
        words = ["ip", "netns", "exec", host.namespace, "env", *(f"{k}={v}" for k, v in env.items())]
        words += [sys.executable, "-W", "always", "-m", "tests.bench.rails", "--rank", str(rank)]
        running.append(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    started = rig.home / "started"
    if cut:
        end = time.monotonic() + 60
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(random.uniform(0, MOST_PAUSE_S))  # before the first chunk, or under one
        space = ["ip", "-n", rig.hosts[1].namespace]
        subprocess.run([*space, "link", "set", "rail2", "down"], check=True)
    answers = [process.communicate(timeout=180)[0] for process in running]
    if cut:
        started.unlink()
    assert not any(p.returncode for p in running), answers
    found: dict[str, float] = json.loads(answers[0].splitlines()[-1])
    return found


def rank_of_job(rank: int, settings: dict[str, Any]) -> None:
    """One rank: messages to its partner, then sums."""
    import torch
    import torch.distributed as dist

    from hetctl.comm.contract.placement import PlacedIsland, Placement
    from hetctl.comm.group.autoload import register
    from hetctl.comm.operation.recorder import RECORDER

    first, world = SIZES[0], sum(SIZES)
    islands = (
        PlacedIsland("first", "cpu", "gloo", tuple(range(first))),
        PlacedIsland("second", "cpu", "gloo", tuple(range(first, world))),
    )
    path = Path(settings["folder"]) / f"placement-{rank}.json"
    path.write_text(Placement(islands, hosts=("a",) * first + ("b",) * (world - first)).to_json())
    os.environ[variables.PLACEMENT] = str(path)
    torch.set_num_threads(1)
    register()
    store = dist.TCPStore(settings["store"], 29517, world, is_master=rank == 0)
    dist.init_process_group("het", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=120))
    data = torch.arange(settings["megabytes"] * 250_000, dtype=torch.float32) % 1000
    found: dict[str, Any] = {}
    seconds = [message(rank, data) for _ in range(2)][-1]
    found["message_bytes_per_s"] = data.nbytes / seconds
    inside = [dist.new_group(list(island.ranks)) for island in islands][rank >= first]
    for _ in range(2):  # reduce-scatter and all-gather inside each island: the native part of a sum
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data.clone(), group=inside)
        dist.barrier()
        found["native_s"], found["bytes"] = time.perf_counter() - began, data.nbytes
    if settings["cut"] and rank == 0:
        (Path(settings["folder"]) / "started").touch()
    for _ in range(3 if settings["cut"] else 2):
        total = data.clone()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(total)
        dist.barrier()
        found["all_reduce_s"] = max(time.perf_counter() - began, found.get("all_reduce_s", 0.0) * settings["cut"])
        assert torch.equal(total, data * world), "the sum is not exact"
    found["lost"] = [e["operation"] for e in RECORDER.entries() if e["operation"].startswith("rail ")]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    if rank == 0:
        found["lost"] = [name for one in every for name in one["lost"]]
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def message(rank: int, data: Any) -> float:
    """Seconds of a message from the first rank of one island to the first of the other."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    if rank == 0:
        dist.send(data, SIZES[0])
    elif rank == SIZES[0]:
        dist.recv(torch.empty_like(data), 0)
    dist.barrier()
    return time.perf_counter() - began


def report(rounds: dict[str, list[dict[str, float]]], lost: dict[str, Any], rate: str) -> None:
    """Ratios of the same round, and the all-reduce's share of what the rails could carry."""
    ratios = [
        f["message_bytes_per_s"] / o["message_bytes_per_s"] for f, o in zip(*reversed(rounds.values()), strict=True)
    ]
    print(f"{RAILS} rails of {rate}, islands of {SIZES[0]} + {SIZES[1]} ranks on 2 hosts, {len(ratios)} rounds")
    shown = ", ".join(f"{r:.2f}" for r in ratios)
    print(f"messages, four rails over one: {shown}, median {statistics.median(ratios):.2f}")
    shares = [
        (four["native_s"] + four["bytes"] / RAILS / one["message_bytes_per_s"]) / four["all_reduce_s"]
        for one, four in zip(rounds["one"], rounds["four"], strict=True)
    ]
    shown = ", ".join(f"{s:.2f}" for s in shares)
    print(f"all-reduce, the bound (native part alone + bytes over four times one rail) over it: {shown}")
    for name, found in rounds.items():
        rates = [f"{f['message_bytes_per_s'] / 1e6:.0f}" for f in found]
        sums = [f"{f['all_reduce_s']:.2f}" for f in found]
        print(f"{name}: messages {', '.join(rates)} MB/s, all-reduce {', '.join(sums)} s")
    print(f"with rail 2 cut while sums run: exact, slowest {lost['all_reduce_s']:.2f} s")
    for name in lost["lost"]:
        print(f"  {name}")


if __name__ == "__main__":
    main()
