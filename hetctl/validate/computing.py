"""Claims about computing: right numbers on each device, the same training as one process, no time lost to a bridge."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.bench.parity import Across, compare
from hetctl.bench.pipeline import SETTINGS, bench_pipeline
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.files import write_json
from hetctl.console import Sink
from hetctl.discovery.inventory import Inventory
from hetctl.doctor.registry import choose
from hetctl.doctor.runner import examine
from hetctl.doctor.tables import document
from hetctl.trainer.recipe import load_recipe, parse_override
from hetctl.validate.claims import Claim, Judgement, could_not_tell, does_not_hold, holds, not_applicable
from hetctl.validate.ground import ClaimHosts

LEAST_RATIO = 0.95  # of the best native schedule in the same run; the H200s' worst round was 0.985
MOST_DEVIATION = 1e-10  # of a loss or norm, in fp64
STEPS, QUICK_STEPS = 20, 3


def check_numerics(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """The doctor's numerics gate on every device."""
    checks = choose(level="perf", only=["perf.numerics"])
    found = examine(Inventory(ground.entries, "validation"), checks, timeout_s=min(300.0, ground.timeout_s))
    write_json(folder / "gate.json", document(found, level="perf"))
    findings = [f for f in found.findings if f.check == "perf.numerics"]
    by_state = {s: [f"{f.host}: {f.reason}" for f in findings if f.state == s] for s in ("fail", "unknown", "ok")}
    if by_state["fail"]:
        return does_not_hold("; ".join(by_state["fail"][:4]), findings=by_state)
    if by_state["unknown"] or not findings:
        return could_not_tell("; ".join(by_state["unknown"][:4]) or "no device was tried", findings=by_state)
    return holds("; ".join(by_state["ok"]), findings=by_state)


def lacks_islands(ground: ClaimHosts) -> str:
    return "" if len(ground.cluster.islands) > 1 else "there is only one island"


def parity_check(across: Across) -> Callable[[ClaimHosts, Path, Sink], Judgement]:
    """The check of training across islands, by stages or by replicas."""

    def check(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
        steps = QUICK_STEPS if ground.quick else STEPS
        found = compare(ground.cluster, across, steps=steps, sink=sink, keep=folder / "ranks")
        write_json(folder / "parity.json", found)
        return judge_parity(found)

    return check


def judge_parity(found: dict[str, Any]) -> Judgement:
    """Within the limit at every step, and something really crossed a bridge."""
    figures = {key: found[key] for key in ("layout", "steps", "worst_deviation", "bridge_bytes")}
    says = f"worst deviation {found['worst_deviation']:.1e} over {found['steps']} steps ({found['layout']})"
    if not found["worst_deviation"] < MOST_DEVIATION:
        return does_not_hold(says, **figures)
    if not found["bridge_bytes"]:
        return could_not_tell(f"nothing crossed a bridge: {found['layout']}", **figures)
    return holds(says, **figures)


def check_pipeline(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """One stage per island on one device each, bridged beside native (naive copies where nothing is native)."""
    big = ground.kind != "cpu" and not ground.quick
    sizes: list[tuple[str, Any]] = [
        ("model.name", "llama-1b-untied" if big else "demo"),
        ("model.seq_len", 4096 if big else 64),
        ("batch.global_batch", 4 if ground.quick else 16),
    ]
    recipe = load_recipe(None, [*map(parse_override, SETTINGS), *sizes])
    rounds = 1 if ground.quick else 5
    found = bench_pipeline(_one_device_each(ground.cluster), recipe, rounds=rounds, sink=sink, keep=folder / "ranks")
    write_json(folder / "pipeline.json", found)
    return judge_pipeline(found, on_cpu=ground.kind == "cpu", quick=ground.quick)


def _one_device_each(cluster: Cluster) -> Cluster:
    """Each island's first device: micro-batches of one sample have nothing for a second one."""
    return replace(cluster, islands=tuple(replace(i, members=i.members[:1]) for i in cluster.islands))


def judge_pipeline(found: dict[str, Any], *, on_cpu: bool, quick: bool) -> Judgement:
    """The median of the rounds' ratios against the limit, on GPUs with a model large enough to say something."""
    tokens = {name: statistics.median(rates) for name, rates in found["tokens_per_s"].items()}
    figures = {key: found.get(key) for key in ("model", "layers", "transports", "best_native", "ratios")}
    figures["tokens_per_s"] = tokens
    spans_all = found["best_native"] != "bridged"
    ratio = statistics.median(found["ratios"]["bridged"]) if spans_all else tokens["bridged"] / tokens["naive"]
    yardstick = "all-native" if spans_all else "naive copies (no native library spans these islands)"
    says = f"bridged at {ratio:.3f} of {yardstick}"
    if on_cpu or quick:
        why = "processes on CPUs share cores" if on_cpu else "--quick takes a tiny model"
        return not_applicable(f"{why}, so that the ratio says nothing of GPUs; it ran: {says}", **figures)
    return (holds if ratio >= (LEAST_RATIO if spans_all else 1.0) else does_not_hold)(says, **figures)


CLAIMS = (
    Claim(
        "numerics.gate",
        "Six operations, forward and backward, are right within rounding on every device.",
        ("docs/benchmarks.md", "The numerics gate on H200s"),
        "torch on the host; a CPU counts as a device where there is no GPU",
        "`hetctl doctor --only perf.numerics`: bf16 and fp32 against fp64, then device classes with each other",
        lambda ground: "",
        check_numerics,
        every_host=True,
    ),
    Claim(
        "parity.pipeline",
        "In fp64 a pipeline across islands trains as one process does, within 1e-10 in every loss and gradient norm.",
        ("README.md", "training across islands equals one process"),
        "two islands",
        "a tiny model, one stage per island, samples of uneven length; the same on one device alone",
        lacks_islands,
        parity_check("pipeline"),
    ),
    Claim(
        "parity.data",
        "In fp64 replicas on several islands train as one process does, within 1e-10 in every loss and gradient norm.",
        ("README.md", "training across islands equals one process"),
        "two islands",
        "a tiny model, gradients summed over the bridge, samples of uneven length; the same on one device alone",
        lacks_islands,
        parity_check("data"),
    ),
    Claim(
        "pipeline.ratio",
        "A pipeline loses no time to the bridge: at least 0.95 of all-native, or, across vendors, of naive copies 1.",
        ("docs/benchmarks.md", "A pipeline across islands, against all-native"),
        "GPUs in two islands",
        "`hetctl bench pipeline` with a Llama of 1.2 billion parameters, the one device an island, five rounds",
        lacks_islands,
        check_pipeline,
    ),
)
