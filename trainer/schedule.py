"""Pipeline schedules as data: for each device, the order of its forwards, backwards and weight gradients.

A further schedule is a row of `SCHEDULES`: planner, simulator and trainer ask the row, none of them knows a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

Kind = Literal["F", "B", "W"]


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


class DeviceActions(Protocol):
    """What a device does that holds the stages `held` of a pipeline. Raises ValueError where that cannot be."""

    def __call__(
        self, micro_batches: int, *, stages: int, held: tuple[int, ...], forwards_ahead: int
    ) -> tuple[Action, ...]: ...


@lru_cache(maxsize=1024)
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


def most_held(actions: tuple[Action, ...], held: Sequence[float], put_off: Sequence[float] = ()) -> float:
    """The most that a device holds at once, of what each micro-batch holds per chunk: so much `held` from its forward
    to its backward, and so much `put_off` from there to its weight gradients, where those are split off."""
    now, most = 0.0, 0.0
    for action in actions:
        c, later = action.chunk, put_off[action.chunk] if put_off else 0.0
        now += {"F": held[c], "B": later - held[c], "W": -later}[action.kind]
        most = max(most, now)
    return most


def _in_order(micro_batches: int, *, stages: int, held: tuple[int, ...], forwards_ahead: int) -> tuple[Action, ...]:
    return stage_actions(micro_batches, forwards_ahead)


def _split(micro_batches: int, *, stages: int, held: tuple[int, ...], forwards_ahead: int) -> tuple[Action, ...]:
    # one stage too: replicas start the sums of their layers in one order
    return split_actions(micro_batches, forwards_ahead, put_off=held[0])


def _in_turn(micro_batches: int, *, stages: int, held: tuple[int, ...], forwards_ahead: int) -> tuple[Action, ...]:
    if len(held) == 1:
        return stage_actions(micro_batches, forwards_ahead)
    return interleaved_actions(micro_batches, devices=stages // len(held), device=held[0], chunks=len(held))


def _stages_left(stages: int, micro_batches: int) -> tuple[int, ...]:
    return tuple(stages - i for i in range(stages))


def _uneven_rounds(devices: int, micro_batches: int) -> str:
    if devices > 1 and micro_batches % devices == 0:
        return ""
    return f"interleaving needs micro-batches in multiples of its {devices} devices, found {micro_batches}"


@dataclass(frozen=True)
class Schedule:
    """All that planner, simulator and trainer ask about a schedule."""

    name: str
    actions: DeviceActions = _in_order
    in_flight: Callable[[int, int], tuple[int, ...]] = _stages_left  # (stages, micro-batches) -> forwards of each stage
    hides_transfers: bool = False  # a stage has more forwards in flight than there are stages from it on
    splits_backward: bool = False  # input gradients at once, weight gradients when there is time
    chunks: tuple[int, ...] = (1,)  # numbers of stages per device to try
    timed_by_search: bool = True  # no: the simulator alone times it, on what the search found with these `in_flight`
    automatic: Literal["never", "always", "on devices"] = "never"  # on devices: not where costs are guessed, on CPUs
    why_not: Callable[[int, int], str] = lambda devices, micro_batches: ""  # several stages a device; empty: it can be
    reason: str = ""  # what a plan says of it


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "1f1b",
            automatic="always",
            reason="1F1B: each stage runs one forward, one backward, with as few in flight as keep all busy.",
        ),
        Schedule(
            "eager-1f1b",
            in_flight=lambda stages, micro_batches: tuple(2 * (stages - i) - 1 for i in range(stages)),
            hides_transfers=True,
            automatic="always",
            reason="Eager 1F1B: further forwards in flight hide transfers and differences between stages.",
        ),
        Schedule(
            "gpipe",
            in_flight=lambda stages, micro_batches: (micro_batches,) * stages,
            hides_transfers=True,
            automatic="on devices",
            reason="GPipe: all forwards, then all backwards; so many activations fit, and nothing waits for transfers.",
        ),
        Schedule(
            "zero-bubble",
            actions=_split,
            splits_backward=True,
            timed_by_search=False,
            automatic="on devices",
            reason="Zero bubble: weight gradients are put off to where a device would wait.",
        ),
        Schedule(
            "interleaved",
            actions=_in_turn,
            chunks=(2, 3, 4),
            timed_by_search=False,
            automatic="on devices",
            why_not=_uneven_rounds,
            reason="Interleaved: {chunks} stages per device were fastest, micro-batches go round as often.",
        ),
    )
}
