"""What ways of training a model take, as tables for people and as a document for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.emulate import HOST_MEMORY
from hetctl.comm.contract.plan import Plan
from hetctl.comm.contract.units import listed, show_bytes, show_seconds
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.render.known import count_of_parameters
from hetctl.render.plan import bridge_line
from hetctl.render.run import BASES
from hetctl.trainer.planning.costs import USABLE_SHARE
from hetctl.trainer.planning.estimate import COUNTS, Estimate, Part, Size, parts_of
from hetctl.trainer.planning.predicted_step import USES
from hetctl.trainer.recipe import Recipe

NAMED = 3  # classes of a size
ASSUMED = (
    "The optimiser's part is its moments and the fp32 copy that it updates, of what is trained.",
    f"Of a device's memory {USABLE_SHARE:.0%} is counted on, less {show_bytes(DeviceClass.runtime_bytes)} for its "
    f"runtime; hosts are taken to have {HOST_MEMORY} times the memory of their devices.",
    "Where all of it is too much, activations are computed again. Classes without bf16 compute in fp16.",
    "How fast: --devices rtx4090:1,rx7900xtx:1 (`hetctl devices` lists classes), or --cluster cluster.yaml.",
)


def estimate_document(recipe: Recipe, precision: str, made: Sequence[Estimate]) -> dict[str, Any]:
    """Everything; of known devices also the plan, as `hetctl plan --json` prints it, and who holds what."""
    return {
        "model": recipe.model.name,
        "parameters": recipe.shape().parameters,
        "seq_len": recipe.model.seq_len,
        "precision": precision,
        "ways": [_way(one) for one in made],
    }


def _way(one: Estimate) -> dict[str, Any]:
    memory = {f"{use}_bytes": size for use, size in one.one_device.items()}
    said: dict[str, Any] = {
        "name": one.way.name,
        "lora_rank": one.way.recipe.lora.rank,
        "quantize": one.way.recipe.lora.quantize,
        "optimizer": one.way.recipe.optimizer.name,
        "one_device": {**memory, "total_bytes": sum(one.one_device.values())},
    }
    if one.planning:
        return {**said, "fits": True, "parts": encode(parts_of(one.planning)), "plan": encode(one.planning.plan)}
    if one.refused:
        return {**said, "fits": False, "error": one.refused.message, "hint": one.refused.hint}
    return {**said, "smallest": encode(one.smallest)}


def show_estimates(sink: Sink, recipe: Recipe, precision: str, made: Sequence[Estimate]) -> None:
    """Print the memory of one device, then the smallest devices, or what is planned on those that are known."""
    shape, known = recipe.shape(), any(one.planning or one.refused for one in made)
    count = f"{recipe.batch.global_batch} " if known else ""
    what = f"{count}samples of {recipe.model.seq_len:,} tokens{' a step' if known else ''}"
    how = f"{recipe.optimizer.name} in {precision}"
    sink.say(f"{shape.name}, {count_of_parameters(shape.parameters)} parameters: {what}, {how}")
    sink.say(_memory(made))
    if known:
        _show_plans(sink, made)
        return
    sink.say(_sizes(made))
    for sentence in ASSUMED:
        sink.say(f"- {sentence}")


def _memory(made: Sequence[Estimate]) -> Table:
    heads = [Column(head, justify="right") for head in (*USES, "in all")]
    title = "all of it on one device, micro-batches of one sample"
    table = Table("what is trained", *heads, title=title, title_justify="left")
    for one in made:
        sizes = [one.one_device[use] for use in USES]
        table.add_row(one.way.name, *map(show_bytes, (*sizes, sum(sizes))))
    return table


def _sizes(made: Sequence[Estimate]) -> Table:
    heads = ("what is trained", "devices", "each at least", "or, with host memory too")
    table = Table(*heads, title="the smallest known that hold it", title_justify="left")
    for one in made:
        for number, enough in enumerate(one.smallest):
            name = "" if number else one.way.name
            smaller = "no smaller" if enough.with_host == enough.alone else _size(enough.with_host)
            table.add_row(name, str(enough.devices), _size(enough.alone), smaller)
        if not one.smallest:
            table.add_row(one.way.name, str(COUNTS[-1]), _size(None), _size(None))
    return table


def _size(size: Size | None) -> str:
    if size is None:
        return "none is large enough"
    return f"{show_bytes(size.memory_bytes).replace('.0 ', ' ')}: {listed(size.classes, NAMED)}"


def _show_plans(sink: Sink, made: Sequence[Estimate]) -> None:
    right = [Column(head, justify="right") for head in ("step", "tokens/s")]
    table = Table("what is trained", *right, "on", "layers each", "memory", "saved by")
    for one in made:
        if one.planning and (predicted := one.planning.plan.predicted):
            figures = (one.way.name, show_seconds(predicted.step_time_s), f"{predicted.tokens_per_s:,.0f}")
            for number, part in enumerate(parts_of(one.planning)):
                table.add_row(*(("", "", "") if number else figures), *_part(part))
        else:
            table.add_row(one.way.name, "does not fit")
    sink.say(table)
    for one in made:
        if one.refused:
            sink.say(f"- {one.way.name}: {one.refused.message}; {one.refused.hint}")
    plans = [one.planning.plan for one in made if one.planning]
    for line in dict.fromkeys(line for plan in plans for line in _assumed(plan)):
        sink.say(f"- {line}")


def _part(part: Part) -> tuple[str, str, str, str]:
    where = "" if part.island == part.device_class else f" of {part.island}"
    memory = f"{show_bytes(part.memory_bytes)} of {show_bytes(part.device_memory_bytes)}"
    return f"{part.devices} x {part.device_class}{where}", str(part.layers or "idle"), memory, ", ".join(part.savings)


def _assumed(plan: Plan) -> list[str]:
    """What stands behind a plan's figures."""
    basis = [f"Speeds are {BASES[plan.predicted.basis]}."] if plan.predicted else []
    return [*basis, *(f"{bridge_line(bridge)}: {bridge.reason}" for bridge in plan.bridges)]
