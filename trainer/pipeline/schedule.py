"""Pipeline schedules as data: for each device, the order of its forwards, backwards and weight gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W"]
SPLIT = "zero-bubble"  # backward in two halves: input gradients at once, weight gradients when there is time
INTERLEAVED = "interleaved"  # several stages per device
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", INTERLEAVED, SPLIT)


@dataclass(frozen=True)
class Action:
    """One computation of one micro-batch: forward, backward, or (where backward is split) its weight gradients.

    `chunk` counts the stages that one device holds.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f"/{self.chunk}" if self.chunk else "")


def in_flight(stages: int, *, schedule: str = "1f1b") -> tuple[int, ...]:
    """Forwards in flight per stage: p - i under 1F1B, 2(p - i) - 1 under eager 1F1B (hides transfers)."""
    if schedule == "eager-1f1b":
        return tuple(2 * (stages - i) - 1 for i in range(stages))
    return tuple(stages - i for i in range(stages))


def device_actions(
    schedule: str, micro_batches: int, *, stages: int, held: tuple[int, ...], forwards_ahead: int
) -> tuple[Action, ...]:
    """What a device does that holds these stages of a pipeline. Raises ValueError where the schedule cannot be."""
    if len(held) > 1:
        return interleaved_actions(micro_batches, devices=stages // len(held), device=held[0], chunks=len(held))
    if schedule == SPLIT:  # one stage too: replicas start the sums of their layers in one order
        return split_actions(micro_batches, forwards_ahead, put_off=held[0])
    return stage_actions(micro_batches, forwards_ahead)


def stage_actions(micro_batches: int, forwards_ahead: int) -> tuple[Action, ...]:
    """1F1B of one stage: `forwards_ahead` forwards first, then one backward, one forward, until all are done.

    `forwards_ahead` >= `micro_batches` is GPipe. Later stages must run no further ahead than earlier ones.
    """
    if micro_batches < 1 or forwards_ahead < 1:
        raise ValueError("a stage needs at least one micro-batch and one forward in flight")
    warm = min(micro_batches, forwards_ahead)
    actions = [Action("F", k) for k in range(warm)]
    for k in range(micro_batches):
        actions.append(Action("B", k))
        if warm + k < micro_batches:
            actions.append(Action("F", warm + k))
    return tuple(actions)


def split_actions(micro_batches: int, forwards_ahead: int, *, put_off: int) -> tuple[Action, ...]:
    """1F1B with weight gradients `put_off` micro-batches behind their backward (ZB-H1, arXiv 2401.10241).

    Stage i puts off i of them: then every stage of p holds p micro-batches under 1F1B, as its first stage always
    does, and the later ones do at the end what they put off, while the earlier ones still run backwards.
    """
    actions: list[Action] = []
    for action in stage_actions(micro_batches, forwards_ahead):
        actions.append(action)
        if action.kind == "B" and action.micro_batch >= put_off:
            actions.append(Action("W", action.micro_batch - put_off))
    left = range(max(0, micro_batches - put_off), micro_batches)
    return (*actions, *(Action("W", k) for k in left))


def interleaved_actions(micro_batches: int, *, devices: int, device: int, chunks: int) -> tuple[Action, ...]:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): micro-batches go round all devices `chunks` times.

    Each round takes as many micro-batches as there are devices, hence their number must be a multiple of that.
    """
    if micro_batches < 1 or micro_batches % devices:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {devices} devices, as interleaving needs")
    total = micro_batches * chunks

    def action(kind: Kind, turn: int) -> Action:
        rounds, within = divmod(turn, devices * chunks)
        chunk, k = divmod(within, devices)
        return Action(kind, rounds * devices + k, chunk if kind == "F" else chunks - 1 - chunk)

    warm = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)
    actions = [action("F", turn) for turn in range(warm)]
    for turn in range(total):
        if warm + turn < total:
            actions.append(action("F", warm + turn))
        actions.append(action("B", turn))
    return tuple(actions)


def most_held(actions: tuple[Action, ...], *, last: Kind) -> tuple[int, ...]:
    """Per chunk, how many micro-batches' activations are alive at once; `last` is the kind that frees them."""
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in actions:
        if action.kind == "F":
            alive[action.chunk] = alive.get(action.chunk, 0) + 1
            most[action.chunk] = max(most.get(action.chunk, 0), alive[action.chunk])
        elif action.kind == last:
            alive[action.chunk] -= 1
    return tuple(most[chunk] for chunk in sorted(most))
