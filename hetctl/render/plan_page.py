"""The page of a plan: the cluster drawn, the numbers, where a step's time goes, its timeline, memory, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.contract.units import count_of, show_seconds, span_of
from hetctl.render.advice import HEAD, advice_rows, advice_sentence
from hetctl.render.bars import MemoryBar, memory_bars
from hetctl.render.cluster_picture import cluster_picture
from hetctl.render.page import bullets, numbers, page, paragraph, table
from hetctl.render.plan import named_ranks, show_ranks
from hetctl.render.timeline import simulated_rows, timeline
from hetctl.render.verdict import plan_limit, plan_verdict, plan_waterfall
from hetctl.trainer.planning.advise import Advised
from hetctl.trainer.planning.predicted_step import PredictedStep

STAGES = ("replica", "stage", "island", "ranks", "layers", "tensor", "shards", "micro-batches", "recompute", "offload")


def plan_page(
    plan: Plan, step: PredictedStep, *, explanation: Sequence[str] = (), advised: Advised | None = None
) -> str:
    """The page's HTML."""
    limit = plan_limit(plan, step)
    bought = table(HEAD, advice_rows(advised)) + paragraph(advice_sentence(advised)) if advised else Markup()
    sections = [
        ("Figures", _figures(plan)),
        ("Cluster", cluster_picture(plan, limit.islands, limit.why)),
        ("Where a step's time goes", plan_waterfall(plan)),
        ("One step", timeline([("predicted", simulated_rows(plan, step))])),
        ("Memory of each device", memory_bars(memory_rows(plan, step.memory))),
        ("Stages", stages_table(plan)),
        ("Why so", bullets(plan.reasons)),
        ("What else, and what would help", bullets(explanation)),
        ("What to buy, change or leave out", bought),
    ]
    lead = f"{count_of(plan.global_batch, 'sample')} of {plan.seq_len} tokens a step, {plan.schedule}"
    return page(f"hetctl plan: {plan.model}", plan_verdict(plan), sections, lead=lead)


def _figures(plan: Plan) -> Markup:
    if (p := plan.predicted) is None:
        return Markup()
    return numbers(
        (
            ("step", show_seconds(p.step_time_s)),
            ("tokens/s", f"{p.tokens_per_s:,.0f}"),
            ("MFU", None if p.mfu is None else f"{p.mfu:.1%}"),
            ("of the islands alone", None if p.efficiency is None else f"{p.efficiency:.1%}"),
            ("bubbles", f"{p.bubble_share:.1%}"),
            ("bridge", f"{p.bridge_share:.1%}"),
            ("bound, tokens/s", None if p.bound_tokens_per_s is None else f"{p.bound_tokens_per_s:,.0f}"),
            ("basis", p.basis),
        )
    )


def stages_table(plan: Plan) -> Markup:
    """Who holds which layers, and how it runs them."""
    rows = []
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            cells = (
                number,
                index,
                plan.ranks[stage.ranks[0]].island,
                show_ranks(stage.ranks),
                f"{span_of(stage.layers[0], stage.layers[1] - 1)} ({stage.depth})",
                stage.tensor_parallel,
                stage.shards,
                f"{stage.micro_batches} x {stage.micro_batch_size}",
                stage.recompute,
                _on_host(stage),
            )
            rows.append(cells)
    return table(STAGES, rows)


def _on_host(stage: Stage) -> str:
    named = (("optimiser state", stage.offload), ("activations", stage.offload_activations))
    return ", ".join(what for what, there in named if there) or "none"


def memory_rows(
    plan: Plan, memory: Sequence[Mapping[str, int] | None], measured: Sequence[int] = ()
) -> list[MemoryBar]:
    """What ranks are predicted to need, by use where that is known, beside what was measured; equal ones together."""
    if plan.predicted is None:
        return []
    found: dict[tuple[str, tuple[tuple[str, int], ...], int | None], list[int]] = {}
    for rank, need in zip(plan.ranks, plan.predicted.memory_bytes, strict=True):
        uses = memory[rank.rank] if memory else None
        parts = tuple(uses.items()) if uses else (("predicted", need),)
        found.setdefault((rank.island, parts, rank.memory_bytes), []).append(rank.rank)
    rows = []
    for (island, parts, have), ranks in found.items():
        taken = max(measured[r] for r in ranks) if len(measured) == len(plan.ranks) else None
        rows.append(MemoryBar(f"{island}, {named_ranks(ranks)}", parts, have, taken))
    return rows
