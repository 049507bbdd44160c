"""The large all-reduce and reduce: spans of the tensor pass through native and bridge stages, several at once.

First halves (native reduce-scatter, sending) and second ones (what other islands sent, native all-gather) run in two
threads, and every communicator and lane belongs to one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from hetctl.comm.bridge.bridge import Message
from hetctl.comm.group.native import settle
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.group.runner import Part
from hetctl.comm.group.steps import CollectiveSteps, Run, arrive, padded
from hetctl.comm.operation.intervals import overlaps, shares
from hetctl.comm.operation.views import used_here


class ReducedSpan:
    """One span of an all-reduce (or, with `to`, of a reduce into that island) on its way through the stages."""

    def __init__(
        self, lines: CollectiveSteps, data: torch.Tensor, how: Reduction, run: Run, *, to: int | None = None
    ) -> None:
        self._lines, self._data, self._how, self._run, self._to = lines, data, how, run, to
        self._native = lines.native(data.device)
        self._pending: Any = None
        self._moves: list[Message] = []
        self._got: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start the native reduce-scatter of the span."""
        layout = self._lines.layout
        self._whole = padded(self._data, layout.common_parts)
        alone = len(layout.mine) == 1  # then the shard is the whole, and nothing needs copying
        self._shard = self._whole if alone else self._whole.new_empty(self._whole.numel() // len(layout.mine))
        start = layout.place * self._shard.numel()
        self._mine = (start, start + self._shard.numel())
        self._pending = None if alone else self._native.reduce_scatter(self._shard, self._whole, self._how.native)

    def swap(self) -> Part:
        """Start the exchange of the shard with its holders in other islands. Returns what is left to do."""
        settle(self._pending, self._run.deadline, what=self._run.what)
        layout = self._lines.layout
        if self._to is not None:
            self._swap_one_way(self._to)
        elif len(layout.islands) == 2:
            self._swap_with(layout.foreign[0])
        else:
            self._swap_parts()
            return self.reduce_across, self.gather_inside
        return None, self.gather_inside

    def _swap_with(self, island: int) -> None:
        """Two islands: each part is combined as it lands, once its outgoing copy has left."""
        lines, members = self._lines, self._lines.layout.islands[island]
        for place, part in self._parts(island):
            sent = lines.send(part, members[place], self._run)
            got = lines.recv(part, members[place], self._run, combine=self._how.combine, after=sent)
            self._moves += [sent, got]

    def _swap_one_way(self, to: int) -> None:
        layout = self._lines.layout
        for island in layout.foreign if layout.home == to else [to]:
            members = layout.islands[island]
            other = torch.empty_like(self._shard) if layout.home == to else self._shard
            for place, part in self._parts(island, of=other):
                move = self._lines.recv if layout.home == to else self._lines.send
                self._moves.append(move(part, members[place], self._run))
            self._got += [other] if layout.home == to else []

    def _parts(self, island: int, *, of: torch.Tensor | None = None) -> list[tuple[int, torch.Tensor]]:
        """(place, part of this rank's shard) for each rank of an island that holds a part of it."""
        start, shard = self._mine[0], self._shard if of is None else of
        cut = shares(self._whole.numel(), len(self._lines.layout.islands[island]))
        return [(place, shard[a - start : b - start]) for place, (a, b) in overlaps(self._mine, cut)]

    def _swap_parts(self) -> None:
        """More islands: of each atom (held by one rank per island) an island reduces the part that is its own."""
        lines, layout = self._lines, self._lines.layout
        self._atoms = list(self._cut_atoms())
        for holders, parts in self._atoms:
            got = []
            for island in layout.foreign:
                self._moves.append(lines.send(parts[island], holders[island], self._run))
                got.append(torch.empty_like(parts[layout.home]))
                self._moves.append(lines.recv(got[-1], holders[island], self._run))
            self._got += got

    def _cut_atoms(self) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """(holder of each island, one part per island) for each interval of the shard with one holder per island."""
        layout, start = self._lines.layout, self._mine[0]
        cuts = [shares(self._whole.numel(), len(island)) for island in layout.islands]
        edges = sorted({e for cut in cuts for pair in cut for e in pair if self._mine[0] <= e <= self._mine[1]})
        for first, past in itertools.pairwise(edges):
            places = [next(p for p, (a, b) in enumerate(cut) if a <= first and past <= b) for cut in cuts]
            holders = [layout.islands[i][place] for i, place in enumerate(places)]
            atom = self._shard[first - start : past - start]
            yield holders, [atom[a:b] for a, b in shares(past - first, len(layout.islands))]

    def reduce_across(self) -> None:
        """More islands: combine what came, and start the exchange of the reduced parts."""
        arrive(self._moves)
        layout, each = self._lines.layout, len(self._lines.layout.foreign)
        self._moves = []
        for index, (holders, parts) in enumerate(self._atoms):
            mine = parts[layout.home]
            self._lines.combine_in_order(mine, self._got[index * each : (index + 1) * each], self._how)
            for island in layout.foreign:
                self._moves.append(self._lines.send(mine, holders[island], self._run, second=True))
                self._moves.append(self._lines.recv(parts[island], holders[island], self._run, second=True))

    def gather_inside(self) -> None:
        """Take in what other islands sent, and gather the reduced shards from all ranks of this one."""
        arrive(self._moves)
        if self._to == self._lines.layout.home:
            self._lines.combine_in_order(self._shard, self._got, self._how)
        if self._shard is not self._whole and self._to in (None, self._lines.layout.home):
            gathered = self._native.all_gather(self._whole, self._shard, second=True)
            settle(gathered, self._run.deadline, what=self._run.what)
        if self._whole is not self._data:
            self._data.copy_(self._whole[: self._data.numel()])
        self._free()

    def _free(self) -> None:
        """Scratch was made on the stream of the first half; this one has read it too."""
        for scratch in (self._whole, self._shard, *self._got):
            used_here(scratch)
        self._moves, self._got = [], []
        del self._whole, self._shard
