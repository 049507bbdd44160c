"""Large reduce-scatters, all-gathers and broadcasts, piece by piece: native and bridge stages work at once.

A piece is the same part of every rank's block (of the root's). As with `pipelined_sums.py` several are on the way,
begun in one thread and ended in another, and every communicator and lane belongs to one of them. Each byte crosses
the bridge once for each island that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetctl.comm.bridge.bridge import Message
from hetctl.comm.group.native import StartedNative, settle
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.group.runner import Part
from hetctl.comm.group.steps import CollectiveSteps, Run, arrive, padded
from hetctl.comm.operation.intervals import edges, even
from hetctl.comm.operation.views import used_here


class _BlockPiece:
    """What both directions share: who is where, what is under way, and its scratch.

    `_inside` is the first half's alone, and goes as soon as its stream is ordered behind the native operation: it is as
    large as the pieces of a whole island. `_scratch` is what both halves' streams use.
    """

    def __init__(self, lines: CollectiveSteps, run: Run, device: torch.device) -> None:
        self._lines, self._run, self._layout, self._native = lines, run, lines.layout, lines.native(device)
        self._moves: list[Message] = []
        self._inside: list[torch.Tensor] = []
        self._scratch: list[torch.Tensor] = []

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


class ScatteredPiece(_BlockPiece):
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


class GatheredPiece(_BlockPiece):
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


class BroadcastPiece(_BlockPiece):
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
