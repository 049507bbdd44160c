"""Hierarchical collectives over islands: native inside, intervals of the data between ranks of different islands.

They know natives and a bridge, not c10d: each call runs to its end in the thread that makes it, but for reductions,
broadcasts, reduce-scatters and all-gathers, which yield parts that are still to be ended. Every choice of path
depends only on values that all ranks share (sizes, the layout), never on what a rank sees alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hetctl.comm.bridge.bridge import Message
from hetctl.comm.bridge.staging import CHUNK_BYTES
from hetctl.comm.contract.units import KiB, MiB
from hetctl.comm.group.native import settle
from hetctl.comm.group.pipelined import BroadcastPiece, GatheredPiece, ReducedSpan, ScatteredPiece, in_turn
from hetctl.comm.group.reductions import Reduction
from hetctl.comm.group.runner import Part, at_once, extent
from hetctl.comm.group.steps import CollectiveSteps, Run, arrive, padded
from hetctl.comm.operation.intervals import Interval, edges, even, meet, pieces
from hetctl.comm.operation.views import as_bytes
from hetctl.comm.operation.work import Reduce

SPANS = 6  # of a middling collective on the host: as many as are on their way at once
SPAN_CHUNKS = 16  # of a large one a rank, at most: a span costs Python time, and scratch where islands have more ranks
DEVICE_SPANS = 2  # on devices spans are fewer, and whole slots: one costs more than its copies
# the most that fills a slot over shm, and chunks over tcp (two, or four halves), without a rest
SLOT_BYTES = 16 * MiB - 8 * KiB
PIECE_BYTES = 512 * MiB  # of all ranks' blocks that are on their way together, where that leaves each rank a slot
FLAT_BYTES = 64 * KiB  # up to here one whole vector per peer costs less than two more native steps


class Collectives(CollectiveSteps):
    """The collectives of one process group; tensors are flat, contiguous and detached."""

    def all_reduce(self, data: torch.Tensor, how: Reduction, run: Run) -> Iterator[Part]:
        """Every rank ends with the reduction of all ranks' `data`, the same bits everywhere."""
        return self._reduce(data, how, run, to=None)

    def reduce(self, data: torch.Tensor, how: Reduction, *, root: int, run: Run) -> Iterator[Part]:
        """The root's `data` becomes the reduction; other ranks' `data` is scratch afterwards."""
        return self._reduce(data, how, run, to=self.layout.island_of[root])

    def _reduce(self, data: torch.Tensor, how: Reduction, run: Run, *, to: int | None) -> Iterator[Part]:
        how.before(data)
        if is_small(data):
            settle(self.native(data.device).all_reduce(data, how.native), run.deadline, what=run.what)
            self.combine_in_order(data, self.exchange_whole(data, run), how)
            how.after(data, self.layout.size)
        else:
            yield from in_turn(ReducedSpan(self, data[a:b], how, run, to=to) for a, b in self._spans(data))
            yield None, lambda: how.after(data, self.layout.size)

    def _spans(self, data: torch.Tensor) -> list[Interval]:
        """Intervals of some chunks per rank of the smallest island: enough of them to overlap, not too many to run."""
        parts, fewest = self.layout.common_parts, min(len(i) for i in self.layout.islands)
        each = self._span_bytes(data.nbytes // fewest, data) // data.element_size() * fewest
        return list(pieces(data.numel(), max(each // parts * parts, parts)))

    def _span_bytes(self, nbytes: int, data: torch.Tensor) -> int:
        return span_bytes(nbytes, on_device=not data.is_cpu and len(self.device_types) == 1)

    def _cuts(self, block: torch.Tensor) -> list[Interval]:
        """A block of a reduce-scatter or an all-gather in intervals, each a span of its own."""
        most = max(PIECE_BYTES // self.layout.size // SLOT_BYTES, 1) * SLOT_BYTES
        each = min(self._span_bytes(block.nbytes, block), most)
        return list(pieces(block.numel(), max(each // block.element_size(), 1)))

    def reduce_scatter(self, out: torch.Tensor, data: list[torch.Tensor], how: Reduction, run: Run) -> Iterator[Part]:
        """`out` becomes the reduction of what all ranks hold in `data[this rank]`; it may be that very memory."""
        layout = self.layout
        strangers = [
            block for rank, block in enumerate(data) if rank != layout.rank or block.data_ptr() != out.data_ptr()
        ]
        if meet([extent(out)], [extent(block) for block in strangers]):
            data = [block.clone() for block in data]
        if is_even(data) and not is_small(data[0]):
            cuts = self._cuts(out)
            yield from in_turn(
                ScatteredPiece(self, out[a:b], [block[a:b] for block in data], how, run) for a, b in cuts
            )
            return
        whole = torch.cat(data)
        how.before(whole)
        if is_small(whole):
            settle(self.native(out.device).all_reduce(whole, how.native), run.deadline, what=run.what)
            self.combine_in_order(whole, self.exchange_whole(whole, run), how)
            out.copy_(whole.split([t.numel() for t in data])[layout.rank])
        else:
            self._reduce_scatter_blocks(out, list(whole.split([t.numel() for t in data])), how, run)
        how.after(out, layout.size)

    def _reduce_scatter_blocks(self, out: torch.Tensor, data: list[torch.Tensor], how: Reduction, run: Run) -> None:
        layout, native = self.layout, self.native(out.device)
        wanted = [edges([data[r].numel() for r in island]) for island in layout.islands]
        mine = wanted[layout.home][layout.place]
        got, moves, kept = [], [], []
        for island in layout.foreign:
            held = self._reduced_share(torch.cat([data[r] for r in layout.islands[island]]), how, run)
            kept.append(held)  # the lanes read it until everything has arrived
            start = layout.place * held.numel()
            moves += self.ship(held, (start, start + held.numel()), island, wanted=wanted[island], run=run)
            got.append(torch.empty_like(out))
            total = wanted[layout.home][-1][1]
            theirs = even(total, len(layout.islands[island]))
            moves += self.fetch(got[-1], mine, island, held=theirs, run=run)
        home = torch.cat([data[r] for r in layout.mine])
        settle(native.all_reduce(home, how.native), run.deadline, what=run.what)
        arrive(moves)
        out.copy_(home[mine[0] : mine[1]])
        self.combine_in_order(out, got, how)

    def _reduced_share(self, block: torch.Tensor, how: Reduction, run: Run) -> torch.Tensor:
        """This rank's share of the island's reduction of `block`; the last shares reach past its end."""
        size = len(self.layout.mine)
        whole = padded(block, size)
        share = whole.new_empty(whole.numel() // size)
        settle(self.native(block.device).reduce_scatter(share, whole, how.native), run.deadline, what=run.what)
        return share

    def broadcast(self, data: torch.Tensor, root: int, run: Run) -> Iterator[Part]:
        """Every rank ends with the root's `data` (bytes); of a large one each rank of its island carries a share."""
        if is_small(data):
            self._broadcast_whole(data, root, run)
            return
        fewest = min(len(island) for island in self.layout.islands)
        each = self._span_bytes(data.numel() // fewest, data) * fewest
        yield from in_turn(BroadcastPiece(self, data[a:b], root, run) for a, b in pieces(data.numel(), each))

    def _broadcast_whole(self, data: torch.Tensor, root: int, run: Run) -> None:
        """The root sends to the first rank of each other island, and each island hands it round."""
        layout, moves = self.layout, list[Message]()
        source = root if layout.local(root) else layout.mine[0]
        if layout.rank == root and data.numel():
            moves = [self.send(data, layout.islands[i][0], run) for i in layout.foreign]
        elif layout.rank == source and data.numel():
            arrive([self.recv(data, root, run)])
        native = self.native(data.device)
        settle(native.broadcast(data, layout.mine.index(source)), run.deadline, what=run.what)
        arrive(moves)

    def all_gather(self, out: list[torch.Tensor], data: torch.Tensor, run: Run) -> Iterator[Part]:
        """`out[r]` becomes rank r's `data` (bytes); sizes may differ, as every rank knows them all."""
        if not is_even([*out, data]):
            self.exchange(out, [data] * self.layout.size, run)
        elif data.numel():
            cuts = self._cuts(data)
            yield from in_turn(GatheredPiece(self, [block[a:b] for block in out], data[a:b], run) for a, b in cuts)

    def exchange(self, out: list[torch.Tensor], data: list[torch.Tensor], run: Run) -> None:
        """`data[r]` goes to rank r, `out[r]` comes from rank r; flat tensors, sizes agreed, any may be empty."""
        layout = self.layout
        strangers = [r for r in range(layout.size) if not layout.local(r)]
        moves = [self.send(data[r], r, run) for r in strangers if data[r].numel()]
        moves += [self.recv(out[r], r, run) for r in strangers if out[r].numel()]
        inside = [data[r] for r in layout.mine]
        sent, counts = torch.cat(inside), [t.numel() for t in inside]
        out_counts = [out[r].numel() for r in layout.mine]
        got = sent.new_empty(sum(out_counts))
        native = self.native(sent.device)
        settle(native.all_to_all(got, sent, out_counts=out_counts, counts=counts), run.deadline, what=run.what)
        for rank, part in zip(layout.mine, got.split(out_counts), strict=True):
            out[rank].copy_(part)
        arrive(moves)

    def barrier(self, run: Run) -> None:
        """Nobody leaves before everybody has come."""
        token = torch.zeros(1, dtype=torch.int32, device="cpu")  # whatever the default is
        native = self.native(token.device)
        settle(native.all_reduce(token, _SUM), run.deadline, what=run.what)
        self.exchange_whole(token, run)
        settle(native.all_reduce(token, _SUM), run.deadline, what=run.what)


_SUM = torch.distributed.ReduceOp.SUM


def span_bytes(nbytes: int, *, on_device: bool) -> int:
    """How many of `nbytes` that one rank exchanges go in one span: the same on all ranks."""
    most = SPAN_CHUNKS * CHUNK_BYTES
    if not on_device:
        return min(max(nbytes // SPANS, CHUNK_BYTES), most)
    slots = -(-nbytes // (DEVICE_SPANS * SLOT_BYTES))
    return min(max(slots, 1), most // SLOT_BYTES) * SLOT_BYTES


def is_small(data: torch.Tensor) -> bool:
    """Whether a tensor takes the flat path: one whole vector per peer."""
    return data.numel() * data.element_size() <= FLAT_BYTES


def is_even(blocks: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks' blocks are of one size."""
    return all(block.numel() == blocks[0].numel() for block in blocks)


def check_sparse(op: Any) -> None:
    """Raises ValueError for a reduction other than a sum or an average: where a rank has no entry, it has no say."""
    kind = getattr(op, "op", op)
    if kind not in (Reduce.SUM, Reduce.AVG):
        raise ValueError(f"sparse tensors can be reduced with SUM and AVG only, not with {kind.name}")


def sum_sparse(tensor: torch.Tensor, how: Reduction, collectives: Collectives, run: Run) -> None:
    """Give a sparse COO tensor the coalesced sum over all ranks, or their mean; shapes and dtypes are equal."""
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [int(c) for c in _entries(torch.tensor([indices.size(1)], device=values.device), collectives, None, run)]
    places = _entries(indices, collectives, [c * indices.size(0) for c in counts], run)
    each = math.prod(values.shape[1:])
    numbers = _entries(values, collectives, [c * each for c in counts], run)
    total = torch.zeros_like(mine)
    for count, place, number in zip(counts, places, numbers, strict=True):
        found = place.view(indices.size(0), count), number.view(count, *values.shape[1:])
        total = total + torch.sparse_coo_tensor(*found, size=mine.shape)
    total = total.coalesce()
    how.after(total.values(), collectives.layout.size)
    with torch.no_grad():  # a detached sparse tensor would be another one: it shares values, not their number
        tensor.copy_(total)


def _entries(data: torch.Tensor, collectives: Collectives, sizes: list[int] | None, run: Run) -> list[torch.Tensor]:
    """Every rank's flat `data`, of the sizes given or of this rank's own."""
    lengths = sizes or [data.numel()] * collectives.layout.size
    outs = [torch.empty(n, dtype=data.dtype, device=data.device) for n in lengths]
    at_once(collectives.all_gather([t.view(torch.uint8) for t in outs], as_bytes(data), run))
    return outs
