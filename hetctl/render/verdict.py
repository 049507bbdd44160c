"""What a page says first of a plan or a run: one sentence, what limits a step, and where its time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import count_of, show_seconds
from hetctl.render.bars import waterfall
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.planning.simulate import busy_seconds

WORTH_SAYING = 0.02  # of a step: what the bridge takes below that limits nothing


@dataclass(frozen=True)
class Limit:
    """What limits a step: an island, or the two that a bridge joins; empty: nothing can be named."""

    islands: tuple[str, ...] = ()
    why: str = ""


def plan_verdict(plan: Plan) -> str:
    what = f"{plan.model} on {_devices(plan)}"
    if (p := plan.predicted) is None:
        return f"{what}: planned, not predicted."
    of_parts = "" if p.efficiency is None else f", {p.efficiency:.0%} of what the islands reach alone"
    return f"{what}: {p.tokens_per_s:,.0f} tokens/s predicted, {show_seconds(p.step_time_s)} a step{of_parts}."


def run_verdict(plan: Plan, summary: Mapping[str, Any]) -> str:
    """How it ended, how far it came, and what it reached."""
    planned = f" of {summary['steps_planned']}" if summary["steps_planned"] else ""
    first, last, rate = summary["first_loss"], summary["last_loss"], summary.get("tokens_per_s")
    loss = "" if first is None or last is None else f", loss {first:.2f} to {last:.2f}"
    fast = "" if rate is None else f", {rate:,.0f} tokens/s"
    status = {"done": "Done", "running": "Running", "saved": "Saved and ended, as asked"}
    said = status.get(summary["status"], summary["status"].capitalize())
    return f"{said}: {summary['steps']}{planned} steps of {plan.model} on {_devices(plan)}{loss}{fast}."


def _devices(plan: Plan) -> str:
    islands = f" of {len(plan.islands)} islands" if len(plan.islands) > 1 else ""
    return f"{count_of(plan.world_size, 'device')}{islands}"


def plan_limit(plan: Plan, step: PredictedStep) -> Limit:
    """The bridge where it costs more than waiting does, otherwise the island whose stage computes longest."""
    if (p := plan.predicted) is None:
        return Limit()
    busy: dict[str, float] = {}
    for (replica, stage), seconds in busy_seconds(step.spans).items():
        island = plan.ranks[step.of_replica(plan, replica).stages[stage].ranks[0]].island
        busy[island] = max(busy.get(island, 0.0), seconds / p.step_time_s)
    return _limit(plan, p.bridge_share, p.bubble_share, busy)


def run_limit(plan: Plan, summary: Mapping[str, Any]) -> Limit:
    """The same as measured."""
    busy = {i["name"]: i["shares"]["compute"] for i in summary["islands"] if (i.get("shares") or {}).get("compute")}
    return _limit(plan, summary.get("bridge_share") or 0.0, summary.get("bubble_share") or 0.0, busy)


def _limit(plan: Plan, bridge: float, bubble: float, busy: Mapping[str, float]) -> Limit:
    if plan.bridges and bridge > max(bubble, WORTH_SAYING):
        return Limit(min(plan.bridges, key=_known_rate).islands, f"limits the step: {bridge:.0%} of it")
    if len(busy) < 2:
        return Limit()
    name = max(busy, key=lambda island: busy[island])
    return Limit((name,), f"limits the step: computes {busy[name]:.0%} of it")


def _known_rate(bridge: Any) -> float:
    rates = [rail.rate_bytes_per_s for rail in bridge.rails]
    return sum(rates) if rates and None not in rates else float("inf")


def plan_waterfall(plan: Plan) -> Markup:
    """From all devices computing all the time to the predicted step; empty where nothing was predicted."""
    p = plan.predicted
    if p is None or not p.bound_tokens_per_s:
        return Markup()
    step, bound = p.step_time_s, plan.global_batch * plan.seq_len / p.bound_tokens_per_s
    lost = [("waiting for other stages", p.bubble_share * step), ("the bridge", p.bridge_share * step)]
    rest = step - bound - sum(seconds for _, seconds in lost)
    lost.append(("all else: whole layers, sums inside islands, update", rest))
    if p.mfu is None:
        return waterfall(("all devices compute all the time", bound), lost, "predicted step")
    below = ("kernels below the peak", bound - p.mfu * step)
    return waterfall(("all devices at their peak", p.mfu * step), [below, *lost], "predicted step")


def run_waterfall(plan: Plan, summary: Mapping[str, Any]) -> Markup:
    """From computing, at the devices' peak where that is known, to the step that was reached; empty where unknown."""
    rate, shares = summary.get("tokens_per_s"), summary.get("shares") or {}
    if not rate or not shares.get("compute"):
        return Markup()
    step = plan.global_batch * plan.seq_len / rate
    words = {
        "bubble": "waiting for work of others",
        "bridge": "the bridge",
        "native": "transfers inside islands",
        "update": "update",
    }
    lost = [(word, shares[name] * step) for name, word in words.items() if shares.get(name) is not None]
    computing = shares["compute"] * step
    if (mfu := summary.get("mfu")) is None:
        return waterfall(("computing", computing), lost, "step, as measured")
    below = ("computing below the peak", computing - mfu * step)
    return waterfall(("all devices at their peak", mfu * step), [below, *lost], "step, as measured")
