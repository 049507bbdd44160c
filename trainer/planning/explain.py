"""What a person asks of a plan (what else was close, what binds, what would help most), or why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, NoReturn

from hetctl.comm.contract.errors import Infeasible
from hetctl.comm.contract.units import GiB, count_of, show_bytes, span_of
from hetctl.trainer.planning.advise import Advice
from hetctl.trainer.planning.arrange import PipelineStage
from hetctl.trainer.planning.costs import MODES, PLAIN, USABLE_SHARE, usable_bytes
from hetctl.trainer.planning.predict import Prediction, fastest
from hetctl.trainer.planning.problem import Problem, allowed_modes
from hetctl.trainer.planning.reasons import describe
from hetctl.trainer.planning.search import MOST_MICRO_BATCHES, Candidate, Search
from hetctl.trainer.planning.space import Pins
from hetctl.trainer.planning.would_fit import AT_ALL, PLENTY, Asked, candidates_with, in_one_replica, what_it_takes
from hetctl.trainer.recipe import Recipe


@dataclass(frozen=True)
class Explanation:
    """The sentences of `--explain`."""

    runner_up: str
    order: str
    binds: str
    improvements: tuple[Advice, ...]

    def sentences(self) -> tuple[str, ...]:
        """Everything in reading order; empty parts left out."""
        helping = sorted((i for i in self.improvements if i.kind != "remove"), key=lambda i: -(i.gain or 0.0))
        best = [f"{help.what} gives {help.gain or 0.0:+.1%}." for help in helping[:3]]
        if not best:
            best = ["Nothing tried (faster networks, more memory, one more host of each class) would help noticeably."]
        return tuple(s for s in (self.runner_up, self.order, self.binds, *best) if s)


def explain(
    problem: Problem, predictions: tuple[Prediction, ...], held: Sequence[int], improvements: tuple[Advice, ...] = ()
) -> Explanation:
    """Explain the first of these predictions, each rank of whose plan holds so many bytes, against the others, with
    what was tried on changed clusters."""
    chosen = predictions[0]
    binds = _what_binds(problem, chosen, held)
    return Explanation(_runner_up(problem, predictions), _order(problem, chosen), binds, improvements)


def _what_binds(problem: Problem, chosen: Prediction, held: Sequence[int]) -> str:
    """The constraint that holds the plan back: memory of a rank, a bridge, bubbles, or compute alone."""
    stages = [stage for _, _, stage in chosen.candidate.stages]
    at = max(stages, key=lambda stage: stage.memory_share(held))
    fullest, place = at.memory_share(held), f"rank {at.ranks[0]} ({at.use.pool.name})"
    if PLAIN in problem.modes and any(stage.choice.mode != PLAIN for stage in stages):
        saved = ", ".join(dict.fromkeys(words for stage in stages for words in stage.choice.mode.savings))
        return f"Memory binds: {place} is the fullest ({fullest:.0%} of what is usable), hence {saved}."
    if chosen.bridge_share > max(0.03, chosen.bubble_share):
        return f"The bridge {_slowest_bridge(chosen)} binds: {chosen.bridge_share:.1%} of the step waits for it."
    if chosen.bubble_share > 0.05:
        return f"Bubbles bind: devices wait {chosen.bubble_share:.1%} of the step for their neighbours' work."
    if fullest > 0.9:
        return f"Memory of {place} binds: {fullest:.0%} of what is usable."
    return f"Compute binds; the fullest memory is {place} with {fullest:.0%} of what is usable."


def _runner_up(problem: Problem, predictions: tuple[Prediction, ...]) -> str:
    if len(predictions) < 2:
        near = problem.tolerance > 0  # larger searches leave out early what is slower
        return f"There was no other arrangement {'near enough to be timed' if near else 'that fits'}."
    chosen, other = predictions[0], predictions[1]
    what = "; ".join(
        f"{describe(p)}, {p.batching.micro_batches} x {count_of(p.batching.micro_batch_size, 'sample')}, {p.schedule}"
        for p in other.candidate.pipelines
    )
    slower = other.seconds / chosen.seconds - 1
    return f"The runner-up was {what}: {slower:+.1%} step time{', on fuller devices' if slower < 0 else ''}."


def _order(problem: Problem, chosen: Prediction) -> str:
    """What the islands' given order would have cost, where the plan turns it round."""
    if problem.pins.order is not None or len(chosen.candidate.pipelines) > 1:
        return ""
    order = list(dict.fromkeys(u.pool.island for u in chosen.candidate.pipelines[0].uses))
    given = [name for name in dict.fromkeys(p.island for p in problem.pools) if name in order]
    if order == given:
        return ""
    pinned = dataclasses.replace(problem, pins=dataclasses.replace(problem.pins, order=tuple(given)))
    found = fastest(pinned)
    if found is None:
        return f"In the given order ({', '.join(given)}) nothing fits."
    slower = max(0.0, found.seconds / chosen.seconds - 1)
    return f"The order {', '.join(order)} beats the given one ({', '.join(given)}) by {slower:.1%}."


def _slowest_bridge(chosen: Prediction) -> str:
    hops = {
        f"{a.pool.island} - {b.pool.island}": hop
        for pipeline in chosen.candidate.pipelines
        for (a, b), hop in zip(pairwise(pipeline.stage_uses), pipeline.times.hops, strict=True)
        if a.pool.island != b.pool.island
    }
    return max(hops, key=lambda name: hops[name], default="between the replicas")


def refuse(problem: Problem, asked: Asked) -> NoReturn:
    """Raise Infeasible: the wishes that stand in the way, or what every device lacks and where; and what would do."""
    model, problem = f"'{problem.costs.shape.name}'", dataclasses.replace(problem, tolerance=AT_ALL)
    on_devices = _with_hosts_of(problem, inf)
    many = problem.samples > MOST_MICRO_BATCHES
    most = f": a replica takes at most {MOST_MICRO_BATCHES} micro-batches" if many else ""
    one = in_one_replica(on_devices)
    if one is None and not candidates_with(on_devices, PLENTY):
        named = _named_pins(on_devices, asked.recipe)
        blamed = _blamed(on_devices, named, PLENTY)
        raise Infeasible(
            f"no arrangement of {count_of(sum(p.size for p in problem.pools), 'device')} is possible for "
            f"{count_of(problem.samples, 'sample')} a step {_with(named, blamed) if blamed else 'at all'}",
            hint=(_leave_out(blamed) if blamed else "change batch.global_batch, or the devices") + most,
        )
    asked = asked.in_one_replica() if one else asked
    named = _named_pins(problem, asked.recipe)
    blamed = _blamed(problem, named, 0)
    with_wishes = f"does not fit {_with(named, blamed)}" if blamed else "does not fit"
    hint = _leave_out(blamed) if blamed else what_it_takes(asked)
    if found := Search(on_devices, keep=1).run().candidates:
        raise Infeasible(
            f"{model} {with_wishes} into its hosts' memory: {_host_lacks(problem, found[0])}",
            hint=hint or "more memory or fewer GPUs in a host, more hosts, or a smaller model",
        )
    problem = one or on_devices
    low, high = 0, GiB // 64
    while not (found := candidates_with(problem, high)):
        low, high = high, high * 2
    while high - low > max(high // 64, 1 << 20):
        middle = (low + high) // 2
        better = candidates_with(problem, middle)
        low, high, found = (low, middle, better) if better else (middle, high, found)
    saving = "" if blamed else ", even with everything that saves memory"
    raise Infeasible(
        f"{model} {with_wishes}{saving}: {_lacks(found[0], high)}",
        hint=(hint or "more devices or memory, a smaller model, or shorter samples")
        + (", or a smaller batch.global_batch" + most if many else ""),
    )


def _with_hosts_of(problem: Problem, memory: float) -> Problem:
    """The problem if each device's share of its host's memory were so large."""
    pools = (
        dataclasses.replace(p, rates=dataclasses.replace(p.rates, host_memory_bytes=memory)) for p in problem.pools
    )
    return dataclasses.replace(problem, pools=tuple(pools))


def _host_lacks(problem: Problem, candidate: Candidate) -> str:
    """The stage that would need most of its hosts beyond what they have."""
    shares = {pool.ranks[0]: pool.rates.host_memory_bytes for pool in problem.pools}

    def have(stage: PipelineStage) -> float:
        return min(share for rank, share in shares.items() if rank in stage.use.pool.ranks)

    number, index, worst = max(candidate.stages, key=lambda found: found[2].host_bytes - have(found[2]))
    return (
        f"stage {index} of replica {number} on {worst.use.pool.name} puts {show_bytes(worst.host_bytes)} a rank there "
        f"(state, activations, a checkpoint's copy), its share of the host is {show_bytes(have(worst))}"
    )


def _lacks(candidate: Candidate, extra: int) -> str:
    """The stage that lacks most in a plan made with `extra` bytes more on every device than there are."""

    def have(stage: PipelineStage) -> float:
        return usable_bytes(stage.use.pool.rates) - extra * USABLE_SHARE

    number, index, worst = max(candidate.stages, key=lambda found: found[2].memory_bytes - have(found[2]))
    need, pool, ranks = worst.memory_bytes, worst.use.pool, worst.ranks
    return (
        f"{show_bytes(need - have(worst))} is missing on each {pool.device_class} of {pool.island} that holds "
        f"stage {index} of replica {number} (rank{'s' * (len(ranks) > 1)} {span_of(ranks[0], ranks[-1])}): "
        f"it needs {show_bytes(need)}, {show_bytes(have(worst))} is usable"
    )


def _named_pins(problem: Problem, recipe: Recipe) -> dict[str, tuple[Any, Problem]]:
    """What a recipe pins, each with the problem without it."""
    pins, free, wish = problem.pins, dataclasses.replace, recipe.parallelism

    def without(*names: str) -> Problem:
        return free(problem, pins=free(pins, **dict.fromkeys(names)))

    stages = "layers" if problem.layers else "forwards_ahead" if problem.forwards_ahead else "pipeline"
    named = {
        f"parallelism.{stages}": (
            problem.layers or problem.forwards_ahead or pins.stages,
            free(without("stages"), layers=None, forwards_ahead=None),
        ),
        "parallelism.tensor": (pins.tensor, without("tensor")),
        "parallelism.data": (pins.replicas, without("replicas")),
        "parallelism.order": (pins.order and f"[{', '.join(pins.order)}]", without("order")),
        "batch.micro_batch_size": (problem.micro_batch_size, free(problem, micro_batch_size=None)),
        "parallelism.split": (
            None if problem.split == "auto" else problem.split,
            free(without("stages", "order"), split="auto"),
        ),
        "train.sharded": (
            recipe.train.sharded if problem.costs.whole else None,
            free(problem, costs=free(problem.costs, whole=False)),
        ),
    }
    for key in ("recompute", "activations", "optimizer_state"):
        if (value := getattr(wish, key)) != "auto":
            freed = free(recipe, parallelism=free(wish, **{key: "auto"}))
            named[f"parallelism.{key}"] = value, free(problem, modes=allowed_modes(freed))
    return {key: pair for key, pair in named.items() if pair[0] is not None}


def _blamed(problem: Problem, named: Mapping[str, tuple[Any, Problem]], extra: int) -> list[str]:
    """The pins that stand in the way with so much more memory: each whose absence alone would do; else all, if without
    any of them it goes."""
    alone = [key for key, (_, freed) in named.items() if candidates_with(freed, extra)]
    if alone or not named:
        return alone
    pins = Pins(every_island=problem.pins.every_island)
    costs = dataclasses.replace(problem.costs, whole=False)
    free = dataclasses.replace(problem, pins=pins, costs=costs, micro_batch_size=None, layers=None, forwards_ahead=None)
    return list(named) if candidates_with(dataclasses.replace(free, split="auto", modes=MODES), extra) else []


def _with(named: Mapping[str, tuple[Any, Problem]], blamed: Sequence[str]) -> str:
    return "with " + ", ".join(f"{key}={named[key][0]}" for key in blamed)


def _leave_out(pins: Sequence[str]) -> str:
    return f"leave out or change {' or '.join(pins)}"
