"""The most promising uses of many pools in one pipeline, where their combinations are too many to be bounded each.

Under a threshold on the slowest stage a use of a pool holds so many layers, each at its own seconds: a dynamic program
over pools and layers then finds the uses with which one micro-batch passes soonest. Thresholds are tried on a grid, and
once more around the best. What stands at its edges (order, LM head, hops between pools) is left to the exact split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetctl.trainer.planning.bounds import Rooms, UseBound
from hetctl.trainer.planning.partition import Floats, Whole, undominated

GRID = 16  # thresholds at once
MOST = 3  # combinations of the finer grid


def likely_uses(
    options: Sequence[Sequence[UseBound]], layers: int, *, stages: int | None, limit: float
) -> tuple[Whole, Floats]:
    """(combinations [n, pools] as indices into each pool's options, their seconds [n]) below the limit, fastest first.

    `stages` pins how many there are together.
    """
    rooms = Rooms(options)
    first, last = _span(options, rooms, layers, limit)
    found: dict[tuple[int, ...], float] = {}
    grid = np.geomspace(first, last, GRID)
    for most in (1, MOST):
        ways = _Ways(options, rooms, layers, stages, grid)
        best = np.argsort(ways.seconds, kind="stable")[:most]
        for index in best[np.isfinite(ways.seconds[best])]:
            found.setdefault(ways.uses(int(index)), float(ways.seconds[index]))
        at = int(best[0])
        grid = np.geomspace(grid[max(at - 1, 0)], grid[min(at + 1, GRID - 1)] * 1.0001, GRID)
    kept = sorted((seconds, uses) for uses, seconds in found.items() if seconds < limit)
    uses = np.array([uses for _, uses in kept], dtype=np.int64).reshape(-1, len(options))
    return uses, np.array([seconds for seconds, _ in kept])


def _span(options: Sequence[Sequence[UseBound]], rooms: Rooms, layers: int, limit: float) -> tuple[float, float]:
    """Thresholds from the least under which all layers could have room to what is certainly enough."""
    loads = [b.load for o in options for b in o]
    lowest = max(min(float(load[1]) for load in loads), 1e-12)
    highest = max(lowest * 1.001, max(float(load[np.isfinite(load)][-1]) for load in loads))
    grid = np.geomspace(lowest, highest, 256)
    most = np.sum([held.max(axis=0) for held in rooms.held(grid)], axis=0)
    first = float(grid[min(int(np.searchsorted(most, layers)), len(grid) - 1)])
    return first, max(first * 1.001, min(limit, highest))


class _Ways:
    """For each threshold of a grid the least fill, by pools used so far, stages (where pinned) and layers held."""

    def __init__(
        self,
        options: Sequence[Sequence[UseBound]],
        rooms: Rooms,
        layers: int,
        stages: int | None,
        grid: Floats,
    ) -> None:
        self.layers, self.stages = layers, stages
        every = [np.minimum(held, layers).astype(np.int64) for held in rooms.held(grid)]
        self.kept = [_worth(o, room, pinned=stages is not None) for o, room in zip(options, every, strict=True)]
        self.options = [[o[i] for i in kept] for o, kept in zip(options, self.kept, strict=True)]
        self.rooms = [room[kept] for room, kept in zip(every, self.kept, strict=True)]
        self.least = [np.full((len(grid), (stages or 0) + 1, layers + 1), np.inf)]
        self.least[0][:, 0, 0] = 0.0
        for uses, room in zip(self.options, self.rooms, strict=True):
            self.least.append(self._with(self.least[-1], uses, room))
        ends = min(b.head for o in options for b in o) + min(b.embedding for o in options for b in o)
        self.seconds = self.least[-1][:, -1, layers] + grid + ends

    def _with(self, before: Floats, uses: Sequence[UseBound], room: Whole) -> Floats:
        """One pool more: the least over its uses, those of equally many stages at once."""
        best = np.full_like(before, np.inf)
        counts = np.arange(self.layers + 1)
        for k in {use.use.stages for use in uses}:
            shift = k if self.stages is not None else 0
            rest = before.shape[1] - shift
            if rest < 1 or k > self.layers:
                continue
            alike = [i for i, use in enumerate(uses) if use.use.stages == k]
            each = np.array([uses[i].block for i in alike])[:, None, None, None] * counts
            spare = before[None, :, :rest] - each
            rows = spare.reshape(-1, rest, self.layers + 1)
            held = _window_min(rows, k, room[alike].ravel()).reshape(spare.shape) + each
            held += np.array([uses[i].hops for i in alike])[:, None, None, None]
            np.minimum(best[:, shift:], held.min(axis=0), out=best[:, shift:])
        return best

    def uses(self, index: int) -> tuple[int, ...]:
        """The uses behind the seconds of a threshold."""
        stage, layer, found = self.least[0].shape[1] - 1, self.layers, []
        for number in reversed(range(len(self.options))):
            before, want = self.least[number][index], self.least[number + 1][index, stage, layer]
            options = []
            for u, use in enumerate(self.options[number]):
                shift = use.use.stages if self.stages is not None else 0
                most = int(self.rooms[number][u, index])
                taken = np.arange(use.use.stages, min(most, layer) + 1)
                if shift > stage or not len(taken):
                    continue
                seconds = before[stage - shift, layer - taken] + taken * use.block + use.hops
                at = int(seconds.argmin())
                options.append((abs(float(seconds[at]) - want), u, int(taken[at]), shift))
            _, use_index, taken_layers, shift = min(options)
            found.append(int(self.kept[number][use_index]))
            stage, layer = stage - shift, layer - taken_layers
        return tuple(reversed(found))


def _worth(uses: Sequence[UseBound], room: Whole, *, pinned: bool) -> Whole:
    """Those that no other beats: with room for as much in no more stages, and no slower."""
    costs = np.array([(u.use.stages, -u.use.stages if pinned else 0.0, u.block, u.hops) for u in uses])
    return np.flatnonzero(undominated(np.concatenate([costs, -room], axis=1)))


def _window_min(values: Floats, least: int, most: Whole) -> Floats:
    """[rows, stages, layers + 1]: the least of `values` at `least` to `most` (one a row) layers fewer."""
    widths = np.maximum(most - least + 1, 0)
    doubled = [values]  # the least of 1, 2, 4, .. values up to each place
    while 2 ** len(doubled) <= widths.max(initial=1):
        back = 2 ** (len(doubled) - 1)
        further = doubled[-1].copy()
        further[..., back:] = np.minimum(further[..., back:], doubled[-1][..., :-back])
        doubled.append(further)
    power = np.log2(np.maximum(widths, 1)).astype(np.int64)
    part = np.stack(doubled)[power, np.arange(len(values))]
    place = np.arange(values.shape[-1]) - np.maximum(widths - 2**power, 0)[:, None]
    earlier = np.take_along_axis(part, np.broadcast_to(np.maximum(place, 0)[:, None], part.shape), axis=-1)
    held = np.where(place[:, None] >= 0, np.minimum(part, earlier), part)
    held[widths == 0] = np.inf
    out = np.full_like(values, np.inf)
    out[..., least:] = held[..., : values.shape[-1] - least]
    return out
