"""What `hetctl bench` and the parity run say of claims: exact first, then how fast, and the same as one process."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.bench.bridge import bench_bridge, prove_islands, try_engines
from hetctl.bench.parity import Across, compare
from hetctl.bench.pipeline import SETTINGS, bench_pipeline
from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.comm.contract.units import show_rate
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import Setting
from hetctl.trainer.recipe import load_recipe, parse_override
from hetctl.validate.claims import Judge, Judgement, Measure, could_not_tell, does_not_hold, holds, not_applicable
from hetctl.validate.ground import ClaimHosts

LEAST_RATIO = 0.95  # of the best native schedule in the same run; the H200s' worst round was 0.985
MOST_DEVIATION = 1e-10  # of a loss or norm, in fp64
STEPS, QUICK_STEPS = 20, 3
QUICK_SIZE = "256KiB"  # the largest message under --quick
_LOGGING = Setting("NCCL_DEBUG", "INFO", "evidence of what the library chose; RCCL reads it too")
_REFUSED = "cannot be"  # what a forced bridge that is impossible is answered with


def lacks_islands(ground: ClaimHosts) -> str:
    return "" if len(ground.cluster.islands) > 1 else "there is only one island"


def lacks_group(ground: ClaimHosts) -> str:
    most = max((len(i.members) for i in ground.cluster.islands), default=0)
    return "" if most > 1 else "no island has two devices: there is nobody to talk to natively"


def lacks_device_ground(ground: ClaimHosts) -> str:
    """Emulated islands may ask for `direct`, but it is a peer copy there and shows nothing of NICs."""
    if ground.kind == "cpu":
        return "CPUs have no device memory"
    return ground.lacking("rdma") or ground.lacking("direct")


# --- native libraries and engines ----------------------------------------------------------------------------------


def measure_islands(ground: ClaimHosts, folder: Path, sink: Sink) -> list[dict[str, Any]]:
    """Every island's own library, on all of its ranks."""
    return prove_islands(ground.cluster, sink=sink, settings=(_LOGGING,), keep=folder / "ranks")


def judge_islands(found: list[dict[str, Any]], ground: ClaimHosts) -> Judgement:
    figures, count = {"islands": found}, len(ground.cluster.islands)
    if wrong := [words for island in found for words in island["wrong"]]:
        return does_not_hold("; ".join(wrong[:4]), figures)
    if len(found) < count:
        return could_not_tell(f"only {len(found)} of {count} islands reported", figures)
    libraries = [", ".join(f"{one['library']} {one['version']}" for one in i["libraries"]) for i in found]
    words = [f"{i['name']}: {names} over {i['ranks']} ranks" for i, names in zip(found, libraries, strict=True)]
    return holds(f"sums are exact; {'; '.join(words)}", figures)


def measure_engines(ground: ClaimHosts, folder: Path, sink: Sink) -> list[dict[str, Any]]:
    """An engine of the direct bridge on every host: memory registers, and a transfer to itself arrives."""
    return try_engines(ground.cluster, sink=sink, keep=folder / "ranks")


def judge_engines(found: list[dict[str, Any]], ground: ClaimHosts) -> Judgement:
    figures = {"hosts": found}
    if unable := {one["on"]: _why_no_engine(one) for one in found if not _able(one, "host")}:
        return does_not_hold("; ".join(f"{host}: {why}" for host, why in unable.items()), figures)
    devices = sum(bool(_able(one, "device")) for one in found)
    names = "; ".join(f"{one['on']}: {', '.join(_able(one, 'host'))}" for one in found)
    return holds(f"host memory on {len(found)} hosts ({names}), device memory on {devices} of them", figures)


def _able(one: dict[str, Any], memory: str) -> list[str]:
    return [name for name, said in one["engines"].items() if not said[memory]]


def _why_no_engine(one: dict[str, Any]) -> str:
    return one["lacking"] or "; ".join(f"{name}: {said['host']}" for name, said in one["engines"].items())


# --- bridges -------------------------------------------------------------------------------------------------------


def over(transport: str) -> tuple[Measure, Judge]:
    """One transport, over one pair of islands for each two vendors: a document for each pair."""

    def measure(ground: ClaimHosts, folder: Path, sink: Sink) -> dict[str, Any]:
        found = {}
        size = QUICK_SIZE if ground.quick else None
        for pair in ground.pairs(transport):
            name = " - ".join(i.name for i in pair.islands)
            below = folder / re.sub(r"[^A-Za-z0-9.-]+", "-", name.replace(" ", ""))
            below.mkdir(parents=True, exist_ok=True)
            try:
                found[name] = bench_bridge(pair, bridge=transport, max_size=size, sink=sink, keep=below / "ranks")
            except (ConfigError, WorkFailed) as error:
                said = f"{error.message} {error.hint}"
                if not TRANSPORTS[transport].engine or f"{_REFUSED} {transport}" not in said:
                    raise
                found[name] = {"refused": error.message}
            else:
                write_json(below / "bench.json", found[name])
        return found

    def judge(found: dict[str, Any], ground: ClaimHosts) -> Judgement:
        outcomes = {name: judge_bridge(transport, one) for name, one in found.items()}
        figures = {name: o.figures for name, o in outcomes.items()}
        for verdict in ("does not hold", "could not tell", "holds"):
            of_it = {name: o for name, o in outcomes.items() if o.verdict == verdict}
            if of_it:
                says = "; ".join(f"{name}: {o.says}" for name, o in of_it.items())
                return replace(next(iter(of_it.values())), says=says, figures=figures)
        return could_not_tell("no pair of islands can talk so", figures)

    return measure, judge


def judge_bridge(transport: str, found: Mapping[str, Any]) -> Judgement:
    """A measurement's verdict: nothing wrong in it, and for device memory nothing staged."""
    if "refused" in found:
        return could_not_tell(f"refused, as it should be where it was not proved: {found['refused']}")
    way = found["ways"][transport]
    largest = max(way["message_bytes_per_s"], key=int)
    message, total = (way[f"{what}_bytes_per_s"][largest] for what in ("message", "all_reduce"))
    figures = {
        "device": found["device"],
        "exact": way["exact"],
        "largest_message_bytes": int(largest),
        "message_bytes_per_s": message,
        "all_reduce_bytes_per_s": total,
        "latency_s": way["latency_s"],
        "cpu_s_per_gb": way["cpu_s_per_gb"],
        "raw_bytes_per_s": found["raw_bytes_per_s"],
        "evidence": found["evidence"],
    }
    if wrong := way["exact"]["wrong"]:
        return does_not_hold("; ".join(wrong[:4]), figures)
    if TRANSPORTS[transport].engine:
        if not found["evidence"]:
            return could_not_tell("exact, but no engine told of its transfers", figures)
        if why := _not_as_named(transport, found["evidence"]):
            return does_not_hold(why, figures)
    counts = f"{way['exact']['sums']} sums and {way['exact']['messages']} messages are exact"
    return holds(f"{counts}; messages {show_rate(message)}, sums {show_rate(total)}", figures)


def _not_as_named(transport: str, evidence: list[dict[str, Any]]) -> str:
    """What the engines' own accounts say against the transport's name, '' where nothing does."""
    ways = {way for one in evidence for way in one["ways"]}
    if transport not in ways:
        return f"the engines carried {', '.join(sorted(ways)) or 'nothing'}, not {transport}"
    staged = sum(one["staged_bytes"] for one in evidence)
    if transport == "direct" and ways == {"direct"} and staged:
        return f"{staged} bytes were staged in host memory"
    return ""


# --- training ------------------------------------------------------------------------------------------------------


def parity(across: Across) -> Measure:
    """Training across islands, by stages or by replicas, and the same as one process."""

    def measure(ground: ClaimHosts, folder: Path, sink: Sink) -> dict[str, Any]:
        steps = QUICK_STEPS if ground.quick else STEPS
        return compare(ground.cluster, across, steps=steps, sink=sink, keep=folder / "ranks")

    return measure


def judge_parity(found: dict[str, Any], ground: ClaimHosts) -> Judgement:
    """Within the limit at every step, and something really crossed a bridge."""
    figures = {key: found[key] for key in ("layout", "steps", "worst_deviation", "bridge_bytes")}
    says = f"worst deviation {found['worst_deviation']:.1e} over {found['steps']} steps ({found['layout']})"
    if not found["worst_deviation"] < MOST_DEVIATION:
        return does_not_hold(says, figures)
    if not found["bridge_bytes"]:
        return could_not_tell(f"nothing crossed a bridge: {found['layout']}", figures)
    return holds(says, figures)


def measure_pipeline(ground: ClaimHosts, folder: Path, sink: Sink) -> dict[str, Any]:
    """One stage per island on one device each, bridged beside native (naive copies where nothing is native)."""
    big = ground.kind != "cpu" and not ground.quick
    sizes: list[tuple[str, Any]] = [
        ("model.name", "llama-1b-untied" if big else "demo"),
        ("model.seq_len", 4096 if big else 64),
        ("batch.global_batch", 4 if ground.quick else 16),
    ]
    recipe = load_recipe(None, [*map(parse_override, SETTINGS), *sizes])
    # micro-batches of one sample have nothing for an island's second device
    islands = tuple(replace(i, members=i.members[:1]) for i in ground.cluster.islands)
    cluster, rounds = replace(ground.cluster, islands=islands), 1 if ground.quick else 5
    return bench_pipeline(cluster, recipe, rounds=rounds, sink=sink, keep=folder / "ranks")


def judge_pipeline(found: dict[str, Any], ground: ClaimHosts) -> Judgement:
    """The median of the rounds' ratios against the limit, on GPUs with a model large enough to say something."""
    tokens = {name: statistics.median(rates) for name, rates in found["tokens_per_s"].items()}
    figures = {key: found.get(key) for key in ("model", "layers", "transports", "best_native", "ratios")}
    figures["tokens_per_s"] = tokens
    spans_all = found["best_native"] != "bridged"
    ratio = statistics.median(found["ratios"]["bridged"]) if spans_all else tokens["bridged"] / tokens["naive"]
    yardstick = "all-native" if spans_all else "naive copies (no native library spans these islands)"
    says = f"bridged at {ratio:.3f} of {yardstick}"
    if ground.kind == "cpu" or ground.quick:
        why = "processes on CPUs share cores" if ground.kind == "cpu" else "--quick takes a tiny model"
        return not_applicable(f"{why}, so that the ratio says nothing of GPUs; it ran: {says}", figures)
    return (holds if ratio >= (LEAST_RATIO if spans_all else 1.0) else does_not_hold)(says, figures)
