"""Training on unequal islands against yardsticks of the same launch: speeds, memory, gradient sums, overlap, fabrics.

PYTHONPATH=. python3 tests/gpu/mixed_check.py [--parts speeds,memory,sums,overlap,fabrics] [--model llama-8b]
    [--profile FILE]

Two GPUs an island, four in all (`--each 1`: two in all); `fabrics` needs root, for a namespace whose loopback is
shaped. Every part prints one JSON line per plan and round, and in the end a table with medians and spreads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from hetctl.bench import plans
from hetctl.bench.plans import PlanCase
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.plan import Plan
from hetctl.commands.options import RunOptions
from hetctl.console import Sink
from hetctl.discovery.which_cluster import Where, running_cluster
from hetctl.trainer.planning.assemble import assemble
from hetctl.trainer.planning.profile import load_profile
from hetctl.trainer.recipe import Recipe, load_recipe

FABRIC = "hetmixed"  # the namespace whose loopback is the slow fabric
RAW_BYTES, RAW_TURNS = 4 * 2**20, 300  # of a yardstick's message, and how many a thread moves
WHOLE = ("parallelism.pipeline=1", "parallelism.tensor=1")


class Check:
    """What all parts share: the model, how many devices an island has, and rows for the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.sink = options, Sink(as_json=True)
        self.rows: list[tuple[str, str, str]] = []

    def spec(self, more: str = "") -> str:
        return f"h200:{self.options.each},mi325x:{self.options.each}{more}"

    def cluster(self, spec: str) -> Cluster:
        return running_cluster(Where(None, spec), self.sink)

    def recipe(self, *settings: str, samples: int) -> Recipe:
        o = self.options
        given = (*settings, "train.precision=auto", "checkpoint.last=false")
        return load_recipe(
            None, RunOptions(settings=given, model=o.model, global_batch=samples, seq_len=o.seq_len).overrides
        )

    def case(self, name: str, spec: str, *settings: str, samples: int) -> PlanCase:
        cluster, recipe = self.cluster(spec), self.recipe(*settings, samples=samples)
        profile = load_profile(self.options.profile) if self.options.profile else None
        (case,) = plans.candidates(cluster, recipe, profile=profile, alternatives=0)
        return replace(case, name=name, cluster=cluster)

    def seconds(self, cases: Sequence[PlanCase]) -> dict[str, float]:
        """Median step seconds of every case, one launch; cases share the devices of the first one's cluster."""
        assert cases[0].cluster is not None
        found = plans.bench_plans(cases[0].cluster, cases, steps=self.options.steps, sink=self.sink)
        for row in found["plans"]:
            print(json.dumps(row), flush=True)
        return {row["name"]: row["measured_s"] for row in found["plans"]}

    def rounds(self, cases: Sequence[PlanCase]) -> list[dict[str, float]]:
        return [self.seconds(cases) for _ in range(self.options.rounds)]

    def row(self, part: str, what: str, words: str) -> None:
        self.rows.append((part, what, words[:300]))
        print(part, what, words, sep=" | ", flush=True)

    def note(self, part: str, what: str, values: Sequence[float]) -> None:
        self.row(part, what, f"{statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})")


def speeds(check: Check) -> None:
    """One island at 0.6 of its speed: our plan over the sum of each island's own best one, the uniform split beside."""
    each, samples = check.options.each, check.options.samples
    sides = {"fast": f"h200:{each}", "slow": f"mi325x:{each}@0.6"}
    mixed = check.spec("@0.6")
    both = [check.case("ours", mixed, samples=samples)]
    both.append(check.case("uniform", mixed, "parallelism.split=uniform", samples=samples))
    shares: dict[str, list[float]] = {"ours": [], "uniform": []}
    for _ in range(check.options.rounds):
        alone = sum(samples / 2 / check.seconds([check.case(n, s, samples=samples // 2)])[n] for n, s in sides.items())
        for name, seconds in check.seconds(both).items():
            shares[name].append(samples / seconds / alone)
    for name, values in shares.items():
        check.note("speeds", f"{name}: of the sum of the islands' own best plans", values)


def memory(check: Check) -> None:
    """Under a cap of one island's memory the uniform split runs out of it, ours does not."""
    cap, samples = check.options.cap, 16
    whole, capped = check.spec(), f"h200:{check.options.each}~{cap},mi325x:{check.options.each}"
    ours = check.case("ours", capped, samples=samples)
    check.note("memory", f"{capped}: step seconds", [check.seconds([ours])["ours"]])
    uniform = ("parallelism.split=uniform", "parallelism.pipeline=2")
    try:
        planned = plans.layout(check.case("uniform", capped, *uniform, samples=samples).plan)
    except HetctlError as error:
        planned = f"refused: {error}"
    check.row("memory", f"{capped}: the planner on the uniform split", planned)
    assert ours.cluster is not None
    blind = check.case("uniform", whole, *uniform, samples=samples)  # as planned by somebody who knows of no cap
    plan = assemble(
        ours.cluster,
        blind.recipe,
        blind.recipe.shape(),
        replicas=blind.plan.replicas,
        schedule=blind.plan.schedule,
        forwards_ahead=blind.plan.forwards_ahead,
        predicted=blind.plan.predicted,
        reasons=("Planned for devices without the cap.",),
    )
    try:
        check.seconds([replace(blind, plan=plan, cluster=ours.cluster)])
        ran = "runs as well: choose a smaller --cap"
    except HetctlError as error:
        ran = str(error)
    check.row("memory", f"{capped}: the uniform split, planned blind to the cap", ran)


def sums(check: Check) -> None:
    """Replicas across islands with 1, 4 and 16 micro-batches a step: bridged beside all-native, and tcp's own bound."""
    each, ways = check.options.each, check.options.ways.split(",")
    links: dict[str, float] = {}
    if "tcp" in ways:
        links = {memory: raw_link(each, devices=memory == "devices") for memory in ("host buffers", "devices")}
    for memory, link in links.items():
        words = f"{link / 1e9:.2f} GB/s a rank and way"
        check.row("sums", f"raw gloo over loopback between {memory}, all ranks both ways at once", words)
    for count in map(int, check.options.counts.split(",")):
        sharded = f"train.sharded={check.options.sharded}"
        pinned = (*WHOLE, "parallelism.data=2", "batch.micro_batch_size=" + str(each), sharded)
        samples = 2 * each * count
        cases = [check.case("native", f"h200:{2 * each}", *pinned, samples=samples)]
        for way in ways:
            cases.append(check.case(way, check.spec(), *pinned, f"bridge.transport={way}", samples=samples))
        found = check.rounds(cases)
        for way in ways:
            check.note(
                "sums", f"{count} micro-batches, {way}: native over bridged", [r["native"] / r[way] for r in found]
            )
            check.note("sums", f"{count} micro-batches, {way}: exposed seconds", [r[way] - r["native"] for r in found])
        for memory, link in links.items():
            held = cases[0].recipe.shape().parameters / each  # by each of an island's ranks
            bounds = [_bound(r["native"], count, link, held, check.options.sharded) for r in found]
            ratios = [bound / r["tcp"] for bound, r in zip(bounds, found, strict=True)]
            check.note("sums", f"{count} micro-batches, tcp: the bound between {memory} over tcp", ratios)


def _bound(native: float, count: int, link: float, held: float, sharded: str) -> float:
    """Seconds of a step whose sums move at the link's rate, hidden by all of the micro-batch beside them."""
    forward, backward = native / count / 3, native / count * 2 / 3
    late = 0.5 if sharded == "replicas" else 1.0  # of the fp32 gradients, either way; then as much of bf16 weights
    exposed = max(0.0, 4 * held * late / link - backward)
    return native + exposed + (max(0.0, 2 * held * late / link - forward) if sharded == "replicas" else 0.0)


def raw_link(each: int, *, devices: bool = False, groups: int = 8) -> float:
    """Bytes per second and direction that each of `each` pairs of processes moves, a thread for every gloo group.

    Between host buffers, or `devices`: from and to them, through pinned buffers.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawned = mp.get_context("spawn")
        results = spawned.Queue()
        ranks = [
            spawned.Process(target=_raw_rank, args=(folder, i, each, groups, devices, results)) for i in range(2 * each)
        ]
        for one in ranks:
            one.start()
        rates = [results.get(timeout=120) for _ in ranks]
        for one in ranks:
            one.join()
    return min(rates)


def _raw_rank(folder: str, rank: int, each: int, groups: int, devices: bool, results: Any) -> None:
    """Both ways at once between the processes `rank` and `rank` +- `each`; puts the rate into `results`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=2 * each, store=dist.FileStore(f"{folder}/store", 2 * each))
    pairs = [[dist.new_group([i, i + each]) for _ in range(2 * groups)] for i in range(each)]
    mine, peer = pairs[rank % each], (rank + each) % (2 * each)

    def turn(number: int) -> None:
        """A thread's: one direction of one group."""
        part = torch.zeros(RAW_BYTES, dtype=torch.uint8, pin_memory=devices)
        far = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=f"cuda:{rank}") if devices else part
        stream = torch.cuda.Stream(rank) if devices else None
        sending = (number % 2 == 0) == (rank < peer)
        together.wait()  # everything is allocated here,
        together.wait()  # and in every process
        for _ in range(RAW_TURNS):
            if sending:
                _copied(part, far, stream)
            (dist.send if sending else dist.recv)(part, peer, group=mine[number])
            if not sending:
                _copied(far, part, stream)

    together = threading.Barrier(2 * groups + 1)
    with ThreadPoolExecutor(2 * groups) as pool:
        turns = [pool.submit(turn, number) for number in range(2 * groups)]
        together.wait()
        dist.barrier()
        together.wait()
        begun = time.monotonic()
        for one in turns:
            one.result()
    results.put(RAW_TURNS * groups * RAW_BYTES / (time.monotonic() - begun))
    dist.destroy_process_group()


def _copied(to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    """Through a stream, where there is one: between host buffers the bytes need no copy."""
    if stream is not None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        stream.synchronize()


def overlap(check: Check) -> None:
    """What summing gradients during backward is worth."""
    each = check.options.each
    pinned = (*WHOLE, "parallelism.data=2", "batch.micro_batch_size=" + str(each), "train.sharded=optimizer")
    names = {"during": "true", "after": "false"}
    for way in ("shm", "tcp"):
        more = [f"bridge.transport={way}"]
        cases = [
            check.case(n, check.spec(), *pinned, *more, f"train.overlap={v}", samples=8 * each)
            for n, v in names.items()
        ]
        found = check.rounds(cases)
        check.note("overlap", f"{way}: sums after backward over during", [r["after"] / r["during"] for r in found])


def fabrics(check: Check) -> None:
    """Two one-vendor islands behind a slow link: ours over all-fast, and over an order of ranks that ignores it."""
    samples, pinned = 16 * check.options.each, ("parallelism.pipeline=2", "parallelism.tensor=1")
    fast = check.case("all-fast", f"h200:{2 * check.options.each}", *pinned, samples=samples)
    ours = check.case("ours", check.spec(), *pinned, "bridge.transport=tcp", samples=samples)
    assert ours.cluster is not None
    blind = replace(ours, name="blind", plan=_crossed(ours.cluster, ours.recipe, ours.plan))
    found = check.rounds([fast, ours, blind])
    check.note("fabrics", "all-fast over ours", [r["all-fast"] / r["ours"] for r in found])
    check.note("fabrics", "an order blind to the fabric over ours", [r["blind"] / r["ours"] for r in found])


def _crossed(cluster: Cluster, recipe: Recipe, plan: Plan) -> Plan:
    """The same plan with its ranks dealt out one island after the other: every stage then spans both."""
    half = plan.world_size // 2
    swap = {rank: 2 * (rank % half) + rank // half for rank in range(plan.world_size)}
    back = {place: rank for rank, place in swap.items()}
    replicas = tuple(
        replace(r, stages=tuple(replace(s, ranks=tuple(sorted(back[x] for x in s.ranks))) for s in r.stages))
        for r in plan.replicas
    )
    return assemble(
        cluster,
        recipe,
        recipe.shape(),
        replicas=replicas,
        schedule=plan.schedule,
        forwards_ahead=plan.forwards_ahead,
        predicted=plan.predicted,
        reasons=("Ranks dealt out without regard to islands.",),
    )


PARTS: dict[str, Callable[[Check], None]] = {
    "speeds": speeds,
    "memory": memory,
    "sums": sums,
    "overlap": overlap,
    "fabrics": fabrics,
}


def shaped(rate: str) -> None:
    """Run this script again for `fabrics` alone, inside a namespace whose loopback carries `rate`."""
    space = ["ip", "netns", "exec", FABRIC]
    subprocess.run(["ip", "netns", "add", FABRIC], check=True)
    try:
        subprocess.run([*space, "ip", "link", "set", "lo", "up"], check=True)
        shape = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "8mb", "latency", "50ms"]
        subprocess.run([*space, *shape], check=True)
        again = [sys.executable, *sys.argv, "--parts", "fabrics"]
        subprocess.run([*space, *again], check=False, env={**os.environ, "HETCTL_MIXED_INSIDE": "1"})
    finally:
        subprocess.run(["ip", "netns", "del", FABRIC], check=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--each", type=int, default=2, help="devices of an island")
    parser.add_argument("--samples", type=int, default=96, help="a step of `speeds`")
    parser.add_argument("--profile", type=Path, help="plan with what was measured: tests/gpu/predictions/profile.yaml")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", default="1,4,16", help="micro-batches a step of `sums`")
    parser.add_argument("--ways", default="shm,tcp", help="of `sums`")
    parser.add_argument("--sharded", default="optimizer", help="train.sharded of `sums`: optimizer or replicas")
    parser.add_argument("--cap", default="24GiB", help="of the capped island's devices")
    parser.add_argument("--rate", default="10gbit", help="of the slow fabric")
    check = Check(parser.parse_args())
    for name in check.options.parts.split(","):
        try:
            if name == "fabrics" and "HETCTL_MIXED_INSIDE" not in os.environ:
                shaped(check.options.rate)
            else:
                PARTS[name](check)
        except Exception as error:
            traceback.print_exc()
            check.row(name, "FAILED", f"{type(error).__name__}: {error}")
    print("\n".join(" | ".join(row) for row in check.rows))


if __name__ == "__main__":
    main()
