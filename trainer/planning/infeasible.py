"""Why nothing fits: how much memory is missing where, or which wishes exclude each other."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from hetctl.comm.contract.errors import Infeasible
from hetctl.comm.contract.units import GiB, show_bytes
from hetctl.trainer.planning.costs import USABLE_SHARE, usable_bytes
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.search import MOST_MICRO_BATCHES, Candidate, Search

PLENTY = 1 << 50  # bytes that no model needs


def refuse(problem: Problem) -> NoReturn:
    """Raise Infeasible: the least that every device lacks and where, or the wishes that cannot be met."""
    many = problem.samples > MOST_MICRO_BATCHES
    most = f": a replica takes at most {MOST_MICRO_BATCHES} micro-batches" if many else ""
    if not _fits(problem, PLENTY):
        raise Infeasible(_wishes(problem), hint="free one of them, or change batch.global_batch" + most)
    low, high = 0, GiB // 64
    while not (found := _fits(problem, high)):
        low, high = high, high * 2
    while high - low > max(high // 64, 1 << 20):
        middle = (low + high) // 2
        better = _fits(problem, middle)
        low, high, found = (low, middle, better) if better else (middle, high, found)
    raise Infeasible(
        f"'{problem.costs.shape.name}' does not fit, even with everything that saves memory: " + _lacks(found[0], high),
        hint="more devices or memory, a smaller model, shorter samples, or fewer pins in parallelism"
        + (", or a smaller batch.global_batch" + most if many else ""),
    )


def _fits(problem: Problem, extra: int) -> list[Candidate]:
    """Plans with `extra` bytes more on every device."""
    pools = tuple(
        dataclasses.replace(p, rates=dataclasses.replace(p.rates, memory_bytes=p.rates.memory_bytes + extra))
        for p in problem.pools
    )
    return Search(dataclasses.replace(problem, pools=pools), keep=1).run().candidates


def _lacks(candidate: Candidate, extra: int) -> str:
    """The stage that lacks most in a plan made with `extra` bytes more on every device than there are."""
    worst, sentence = float("-inf"), ""
    for number, pipeline in enumerate(candidate.pipelines):
        within: dict[int, int] = {}
        for index, (use, need) in enumerate(zip(pipeline.stage_uses, pipeline.memory_bytes, strict=True)):
            ranks = use.stage_ranks(within.get(id(use), 0))
            within[id(use)] = within.get(id(use), 0) + 1
            have = usable_bytes(use.pool.rates) - extra * USABLE_SHARE
            if need - have > worst:
                worst = need - have
                sentence = (
                    f"{show_bytes(worst)} is missing on each {use.pool.device_class} of {use.pool.island} that holds "
                    f"stage {index} of replica {number} (ranks {ranks[0]}-{ranks[-1]}): it needs {show_bytes(need)}, "
                    f"{show_bytes(have)} is usable"
                )
    return sentence


def _wishes(problem: Problem) -> str:
    pins = problem.pins
    named = {
        "parallelism.pipeline": pins.stages,
        "parallelism.tensor": pins.tensor,
        "parallelism.data": pins.replicas,
        "parallelism.order": None if pins.order is None else "[" + ", ".join(pins.order) + "]",
        "batch.micro_batch_size": problem.micro_batch_size,
        "parallelism.split": None if problem.split == "auto" else problem.split,
    }
    given = [f"{k}={v}" for k, v in named.items() if v is not None]
    devices = sum(p.size for p in problem.pools)
    asked = "with " + ", ".join(given) if given else "at all"
    return f"no arrangement of {devices} devices is possible for {problem.samples} samples a step {asked}"
