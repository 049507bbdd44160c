"""Large collectives, piece by piece: native and bridge stages work at once, several pieces are on their way.

First halves (native reduce-scatter, sending) and second ones (what other islands sent, native all-gather) run in two
threads, and every communicator and lane belongs to one of them. A piece of an all-reduce or reduce is a span of the
tensor; of the others it is the same part of every rank's block (of the root's), and each byte crosses the bridge once
for each island that needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from hetctl.comm.bridge.bridge import Message
from hetctl.comm.group.native import StartedNative, settle
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.group.runner import Part
from hetctl.comm.group.steps import CollectiveSteps, Run, arrive, padded
from hetctl.comm.operation.intervals import edges, even, overlaps, shares
from hetctl.comm.operation.views import used_here


class CollectivePiece:
    """A part of a large collective on its way: who is where, what is under way, and its scratch.

    `_inside` is the first half's alone, and goes as soon as its stream is ordered behind the native operation: it is as
    large as the pieces of a whole island. `_scratch` is what both halves' streams use.
    """

    def __init__(self, lines: CollectiveSteps, run: Run, device: torch.device) -> None:
        self._lines, self._run, self._layout, self._native = lines, run, lines.layout, lines.native(device)
        self._pending: StartedNative | None = None
        self._moves: list[Message] = []
        self._inside: list[torch.Tensor] = []
        self._scratch: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start what happens inside the island."""
        raise NotImplementedError

    def swap(self) -> Part:
        """Start the exchange with other islands. Returns what is left to do."""
        raise NotImplementedError

    def _await(self, started: StartedNative | None) -> None:
        settle(started, self._run.deadline, what=self._run.what)

    def _new(self, like: torch.Tensor, count: int) -> torch.Tensor:
        self._scratch.append(like.new_empty(count))
        return self._scratch[-1]

    def _free(self) -> None:
        """Scratch was made on the stream of the first half; this one has read it too."""
        for scratch in self._scratch:
            used_here(scratch)
        self._moves, self._scratch = [], []


def in_turn(pieces: Iterable[CollectivePiece]) -> Iterator[Part]:
    """Begin each piece while the one before it is reduced or gathered inside; yields what is left once it is sent."""
    last: CollectivePiece | None = None
    for piece in pieces:
        piece.begin()
        if last is not None:
            yield last.swap()
        last = piece
    if last is not None:
        yield last.swap()


class ReducedSpan(CollectivePiece):
    """One span of an all-reduce (or, with `to`, of a reduce into that island) on its way through the stages."""

    def __init__(
        self, lines: CollectiveSteps, data: torch.Tensor, how: Reduction, run: Run, *, to: int | None = None
    ) -> None:
        super().__init__(lines, run, data.device)
        self._data, self._how, self._to = data, how, to
        self._got: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start the native reduce-scatter of the span."""
        layout = self._layout
        self._whole = padded(self._data, layout.common_parts)
        self._scratch.append(self._whole)
        alone = len(layout.mine) == 1  # then the shard is the whole, and nothing needs copying
        self._shard = self._whole if alone else self._new(self._whole, self._whole.numel() // len(layout.mine))
        start = layout.place * self._shard.numel()
        self._mine = (start, start + self._shard.numel())
        self._pending = None if alone else self._native.reduce_scatter(self._shard, self._whole, self._how.native)

    def swap(self) -> Part:
        """Start the exchange of the shard with its holders in other islands. Returns what is left to do."""
        self._await(self._pending)
        layout = self._layout
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
        lines, members = self._lines, self._layout.islands[island]
        for place, part in self._parts(island):
            sent = lines.send(part, members[place], self._run)
            got = lines.recv(part, members[place], self._run, combine=self._how.combine, after=sent)
            self._moves += [sent, got]

    def _swap_one_way(self, to: int) -> None:
        layout = self._layout
        for island in layout.foreign if layout.home == to else [to]:
            members = layout.islands[island]
            other = self._new(self._shard, self._shard.numel()) if layout.home == to else self._shard
            for place, part in self._parts(island, of=other):
                move = self._lines.recv if layout.home == to else self._lines.send
                self._moves.append(move(part, members[place], self._run))
            self._got += [other] if layout.home == to else []

    def _parts(self, island: int, *, of: torch.Tensor | None = None) -> list[tuple[int, torch.Tensor]]:
        """(place, part of this rank's shard) for each rank of an island that holds a part of it."""
        start, shard = self._mine[0], self._shard if of is None else of
        cut = shares(self._whole.numel(), len(self._layout.islands[island]))
        return [(place, shard[a - start : b - start]) for place, (a, b) in overlaps(self._mine, cut)]

    def _swap_parts(self) -> None:
        """More islands: of each atom (held by one rank per island) an island reduces the part that is its own."""
        lines, layout = self._lines, self._layout
        self._atoms = list(self._cut_atoms())
        for holders, parts in self._atoms:
            got = []
            for island in layout.foreign:
                self._moves.append(lines.send(parts[island], holders[island], self._run))
                got.append(self._new(self._shard, parts[layout.home].numel()))
                self._moves.append(lines.recv(got[-1], holders[island], self._run))
            self._got += got

    def _cut_atoms(self) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """(holder of each island, one part per island) for each interval of the shard with one holder per island."""
        layout, start = self._layout, self._mine[0]
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
        layout, each = self._layout, len(self._layout.foreign)
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
        if self._to == self._layout.home:
            self._lines.combine_in_order(self._shard, self._got, self._how)
        if self._shard is not self._whole and self._to in (None, self._layout.home):
            self._await(self._native.all_gather(self._whole, self._shard, second=True))
        if self._whole is not self._data:
            self._data.copy_(self._whole[: self._data.numel()])
        self._free()
        self._got = []
        del self._whole, self._shard


class ScatteredPiece(CollectivePiece):
    """A piece of every block of a reduce-scatter, on the way to the block's rank."""

    def __init__(
        self, lines: CollectiveSteps, out: torch.Tensor, blocks: Sequence[torch.Tensor], how: Reduction, run: Run
    ) -> None:
        super().__init__(lines, run, out.device)
        self._out, self._blocks, self._how = out, blocks, how
        self._got: list[torch.Tensor] = []

    def begin(self) -> None:
        """Start the native reduce-scatters: of each other island's blocks, and of this island's."""
        self._abroad = [self._share([self._blocks[r] for r in self._layout.islands[i]]) for i in self._layout.foreign]
        self._home = self._share([self._blocks[r] for r in self._layout.mine], self._out)

    def _share(
        self, parts: list[torch.Tensor], into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, StartedNative | None]:
        """This rank's share of its island's reduction of `parts`, end to end, and what has to be awaited for it."""
        size = len(self._layout.mine)
        if size == 1 and len(parts) == 1 and self._how.scale is None:
            whole = parts[0]  # nothing is computed here, and nothing needs copying
        else:
            whole = padded(torch.cat(parts), size)
            (self._inside if size > 1 else self._scratch).append(whole)
            self._how.before(whole)
        if size > 1:
            share = self._new(whole, whole.numel() // size) if into is None else into
            return share, self._native.reduce_scatter(share, whole, self._how.native)
        if into is not None and into.data_ptr() != whole.data_ptr():
            into.copy_(whole)
        return whole, None

    def swap(self) -> Part:
        layout, count = self._layout, self._out.numel()
        for island, (share, pending) in zip(layout.foreign, self._abroad, strict=True):
            self._await(pending)
            held = (layout.place * share.numel(), (layout.place + 1) * share.numel())
            wanted = edges([count] * len(layout.islands[island]))
            self._moves += self._lines.ship(share, held, island, wanted=wanted, run=self._run)
        self._await(self._home[1])
        self._inside = []
        mine, total = (layout.place * count, (layout.place + 1) * count), count * len(layout.mine)
        for island in layout.foreign:
            held_there = even(total, len(layout.islands[island]))
            if len(layout.foreign) == 1:  # combined as it lands
                into, how = self._out, {"combine": self._how.combine}
            else:
                into, how = self._new(self._out, count), {}
                self._got.append(into)
            self._moves += self._lines.fetch(into, mine, island, held=held_there, run=self._run, **how)
        return None, self._end

    def _end(self) -> None:
        arrive(self._moves)
        if self._got:
            self._lines.combine_in_order(self._out, self._got, self._how)
        self._how.after(self._out, self._layout.size)
        self._free()


class GatheredPiece(CollectivePiece):
    """A piece of every block of an all-gather, on the way to all ranks; tensors are bytes."""

    def __init__(self, lines: CollectiveSteps, out: Sequence[torch.Tensor], data: torch.Tensor, run: Run) -> None:
        super().__init__(lines, run, data.device)
        self._out, self._data = out, data
        self._blocks: list[tuple[int, torch.Tensor]] = []  # of other islands: this rank's share of each

    def begin(self) -> None:
        """Send this rank's piece to who needs it abroad, and start gathering those of its island."""
        layout, count, size = self._layout, self._data.numel(), len(self._layout.mine)
        held = (layout.place * count, (layout.place + 1) * count)
        for island in layout.foreign:
            wanted = even(size * count, len(layout.islands[island]))
            self._moves += self._lines.ship(self._data, held, island, wanted=wanted, run=self._run)
        self._inside = [self._data if size == 1 else self._data.new_empty(size * count)]
        self._pending = None if size == 1 else self._native.all_gather(self._inside[0], self._data)

    def swap(self) -> Part:
        layout, count, size = self._layout, self._data.numel(), len(self._layout.mine)
        self._await(self._pending)
        self._deal(self._inside.pop(), layout.mine)
        for island in layout.foreign:
            members = layout.islands[island]
            if size == 1:  # what is fetched is all there is to it
                self._moves += [self._lines.recv(self._out[r], r, self._run) for r in members]
                continue
            parts = even(len(members) * count, size)
            share = self._new(self._data, -(-len(members) * count // size))
            self._blocks.append((island, share))
            held = edges([count] * len(members))
            self._moves += self._lines.fetch(share, parts[layout.place], island, held=held, run=self._run)
        return None, self._end

    def _deal(self, whole: torch.Tensor, ranks: Sequence[int]) -> None:
        """Consecutive parts of `whole` into the blocks of these ranks; this rank's own may be the data itself."""
        count = self._data.numel()
        for place, rank in enumerate(ranks):
            if self._out[rank].data_ptr() != self._data.data_ptr():
                self._out[rank].copy_(whole[place * count : (place + 1) * count])

    def _end(self) -> None:
        arrive(self._moves)
        for island, share in self._blocks:
            whole = self._new(share, share.numel() * len(self._layout.mine))
            self._await(self._native.all_gather(whole, share, second=True))
            self._deal(whole, self._layout.islands[island])
        self._free()


class BroadcastPiece(CollectivePiece):
    """A piece of what one rank holds, on the way to all; tensors are bytes. Each rank of its island sends a share."""

    def __init__(self, lines: CollectiveSteps, data: torch.Tensor, root: int, run: Run) -> None:
        super().__init__(lines, run, data.device)
        self._data, self._root, self._origin = data, root, lines.layout.island_of[root]
        self._share: torch.Tensor | None = None  # of who gathers it from shares

    def begin(self) -> None:
        """In the root's island: start handing it round there."""
        at_home = self._layout.home == self._origin
        self._pending = self._native.broadcast(self._data, self._layout.mine.index(self._root)) if at_home else None

    def swap(self) -> Part:
        layout, total, home = self._layout, self._data.numel(), self._layout.home
        cuts = [even(total, len(island)) for island in layout.islands]
        first, past = cuts[home][layout.place]
        if home == self._origin:
            self._await(self._pending)
            for island in layout.foreign:
                part = self._data[first:past]
                self._moves += self._lines.ship(part, (first, past), island, wanted=cuts[island], run=self._run)
            return None, self._end
        into = self._data
        if len(layout.mine) > 1:
            into = self._share = self._new(self._data, -(-total // len(layout.mine)))
        self._moves += self._lines.fetch(into, (first, past), self._origin, held=cuts[self._origin], run=self._run)
        return None, self._end

    def _end(self) -> None:
        arrive(self._moves)
        if self._share is not None:
            count = self._share.numel() * len(self._layout.mine)
            whole = self._data if count == self._data.numel() else self._new(self._data, count)
            self._await(self._native.all_gather(whole, self._share, second=True))
            if whole is not self._data:
                self._data.copy_(whole[: self._data.numel()])
        self._free()
