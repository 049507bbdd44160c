"""A plan's reasons: one sentence per choice that a person would ask about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hetctl.comm.contract.transports import NATIVE
from hetctl.comm.contract.units import count_of, show_bytes
from hetctl.trainer.planning.arrange import Pipeline
from hetctl.trainer.planning.costs import PLAIN
from hetctl.trainer.planning.predict import Prediction
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import Candidate, SearchResult
from hetctl.trainer.schedule import SCHEDULES


def reasons(
    problem: Problem, chosen: Prediction, found: SearchResult, alone: Mapping[str, float | None]
) -> tuple[str, ...]:
    """Why this plan: arrangement, split, micro-batches, memory, schedule, what stays idle or out of reach."""
    pipelines = chosen.candidate.pipelines
    said = [_arrangement(pipelines, chosen.candidate.clones), _split(problem, pipelines), _batches(problem, pipelines)]
    said += _memory(problem, chosen.candidate)
    said += _tied(problem, pipelines)
    said += _tensors(problem, pipelines)
    said += _schedules(pipelines)
    said += _assumed(problem, pipelines)
    said += _left_out(problem, pipelines)
    said += [
        f"{name} cannot train this model alone, so there is no efficiency to state."
        for name, rate in alone.items()
        if rate is None
    ]
    said += problem.notes
    if found.tolerance:
        said.append(
            f"Of so many devices gains under {found.tolerance:.2%} were not looked for, at any step of the search."
        )
        if len(pipelines) > 1:
            said.append(
                "Unequal replicas share samples by their own times and are compared by what they take together."
            )
    if found.thinned:
        said.append("Of so many devices only the likeliest uses and groupings were tried, not all.")
    return tuple(said)


def describe(pipeline: Pipeline) -> str:
    """`17 layers on h200 (8 wide), then 15 on mi325x (8 wide)`."""
    parts, at = [], 0
    devices = len(pipeline.layers) // pipeline.chunks
    for use in pipeline.uses:
        stages = [s for s in range(len(pipeline.layers)) if at <= s % devices < at + use.stages]
        layers = [pipeline.layers[s] for s in stages]
        at += use.stages
        how = [f"{use.width} wide"] if use.width > 1 else []
        how += [f"tensor {use.tensor}"] if use.tensor > 1 else []
        many = f" in {len(layers)} stages of {_counts(layers)}" if len(layers) > 1 else ""
        noun = "layer" if sum(layers) == 1 else "layers"
        parts.append(f"{sum(layers)} {noun} on {use.pool.name}{many}" + (f" ({', '.join(how)})" if how else ""))
    return ", then ".join(parts)


def _arrangement(pipelines: Sequence[Pipeline], clones: int) -> str:
    if len(pipelines) == 1:
        islands = {u.pool.island for u in pipelines[0].uses}
        why = (
            "only the pipeline crosses islands, since activations are the smallest traffic"
            if len(islands) > 1
            else "no traffic of the model leaves the island"
        )
        many = "One replica" if clones == 1 else f"{clones} equal replicas, together"
        return f"{many}: {describe(pipelines[0])}; {why}."
    each = "; ".join(describe(p) for p in pipelines)
    crossed = len({u.pool.island for p in pipelines for u in p.uses}) > 1
    why = "each gradient crosses islands once a step" if crossed else "gradients are summed once a step"
    return f"{len(pipelines)} replicas that differ: {each}; {why}."


def _split(problem: Problem, pipelines: Sequence[Pipeline]) -> str:
    if problem.layers is not None:
        return "The layers per stage are pinned by the recipe."
    if problem.split == "uniform":
        return "The split is uniform, as asked: equal layers per stage, whatever the devices."
    if problem.split == "holmes":
        return f"The split follows Holmes' rule, as asked: floor(alpha S_i / sum(S) N) with alpha {problem.alpha:g}."
    if max(len(p.layers) for p in pipelines) == 1:
        return "Every replica holds all layers in one stage."
    return "The split is the fastest found of whole layers, as simulated: embedding, LM head and memory counted."


def _batches(problem: Problem, pipelines: Sequence[Pipeline]) -> str:
    sizes = [p.batching.micro_batch_size for p in pipelines]
    counts = [p.batching.micro_batches for p in pipelines]
    if len(pipelines) == 1:
        samples = count_of(problem.samples, "sample")
        if problem.micro_batch_size is not None:
            many = count_of(counts[0], "micro-batch", "micro-batches")
            return f"{samples} in {many} of {sizes[0]}, as the recipe pins it."
        if counts[0] == 1:
            return f"All {samples} in one micro-batch were fastest, and fit."
        return f"{counts[0]} micro-batches of {sizes[0]} were the fastest way through {samples}."
    if len(set(counts)) == 1:
        shared = "/".join(map(str, sizes))
        return f"Micro-batch sizes {shared}, {counts[0]} each, follow the speeds, so that all finish together."
    if len(set(sizes)) == 1:
        shared = "/".join(map(str, counts))
        return (
            f"Accumulation counts {shared} of {sizes[0]} samples follow the replicas' speeds, so all finish together."
        )
    return "Sizes and counts follow the speeds, so all finish together."


def _memory(problem: Problem, candidate: Candidate) -> list[str]:
    said, pipelines = list[str](), candidate.pipelines
    why = "the fastest way that does" if PLAIN in problem.modes else "of which the recipe pins some"
    for number, index, stage in candidate.stages:
        if what := stage.choice.mode.savings:
            place = f"Stage {index} of replica {number}" if len(pipelines) > 1 else f"Stage {index}"
            said.append(f"{place} ({stage.use.pool.name}) fits by {' and '.join(what)}, {why}.")
    rates = {u.pool.rates.memory_bytes for p in pipelines for u in p.uses}
    for pipeline in pipelines:
        memories = [u.pool.rates.memory_bytes for u in pipeline.uses]
        if len(rates) > 1 and len(memories) > 1 and memories[0] == max(memories) > min(memories):
            name = pipeline.uses[0].pool.name
            said.append(f"{name} has the most memory and stands first, where 1F1B keeps most activations.")
    return said


def _tied(problem: Problem, pipelines: Sequence[Pipeline]) -> list[str]:
    if not any(p.times.tied.bridged for p in pipelines):
        return []
    return [
        "Embedding and head are one matrix, which the first and the last stage hold both: its gradient, "
        f"{show_bytes(problem.costs.tied_bytes)}, crosses islands once a step too."
    ]


def _tensors(problem: Problem, pipelines: Sequence[Pipeline]) -> list[str]:
    degrees = sorted({u.tensor for p in pipelines for u in p.uses})
    if degrees == [1]:
        return []
    shown = " and ".join(map(str, degrees))
    why = "as pinned" if problem.pins.tensor is not None else "the fastest that fits"
    return [f"Tensor groups of {shown} devices share each layer inside a host, on its native links only: {why}."]


def _schedules(pipelines: Sequence[Pipeline]) -> list[str]:
    most = max(p.chunks for p in pipelines)
    said = dict.fromkeys(SCHEDULES[p.schedule].reason for p in pipelines if len(p.layers) > 1)
    return [reason.format(chunks=most) for reason in said if reason]


def _assumed(problem: Problem, pipelines: Sequence[Pipeline]) -> list[str]:
    """What share of its ports each bridge between used islands is taken to carry, where that was not measured."""
    used = {u.pool.island for p in pipelines for u in p.uses}
    bridges = [link for pair, link in problem.links.bridges.items() if pair <= used]
    return [
        f"Between islands {'the native library' if kind == NATIVE else kind} is taken to carry {share:.0%} of what "
        "ports could: `hetctl bench bridge` measures it."
        for kind, share in dict.fromkeys((b.transport, b.assumed) for b in bridges)
        if share is not None
    ]


def _left_out(problem: Problem, pipelines: Sequence[Pipeline]) -> list[str]:
    used, have = Counter[str](), Counter[str]()
    for use in (use for pipeline in pipelines for use in pipeline.uses):
        used[use.pool.island] += use.stages * use.width * use.tensor
    for pool in problem.pools:
        have[pool.island] += pool.size
    pins = problem.pins
    pinned = any(v is not None for v in (pins.stages, pins.replicas, pins.tensor, pins.order, problem.micro_batch_size))
    within = ", within what the recipe pins" if pinned else ""
    said = [
        f"{count - used[name]} of {count_of(count, 'device')} of {name} idle: "
        f"more would not make the step faster{within}."
        for name, count in have.items()
        if used[name] < count
    ]
    return said + [refusal.message + "." for refusal in problem.links.refused.values()]


def _counts(layers: Sequence[int]) -> str:
    return str(layers[0]) if len(set(layers)) == 1 else "+".join(map(str, layers))
