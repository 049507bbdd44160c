"""Hierarchical collectives over islands: native inside, intervals of the data between ranks of different islands.

They know natives and a bridge, not c10d: each call runs to its end in the thread that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetctl.comm.forwarded import COLLECTIVE, Bridge, Message
from hetctl.comm.islands import Native, settle
from hetctl.comm.layout import Layout, overlaps, pieces, shares
from hetctl.comm.reductions import Reduction
from hetctl.comm.staging import CHUNK_BYTES
from hetctl.comm.units import KiB
from hetctl.comm.work import Deadline, HetWork

FLAT_BYTES = 64 * KiB  # up to here one whole vector per peer costs less than two more native steps
DEPTH = 3  # chunks between the native reduction of one and the native gathering of another


@dataclass(frozen=True)
class Run:
    """One operation as it runs: its name for errors, and when it must have ended."""

    what: str
    deadline: Deadline


class Collectives:
    """The collectives of one process group; tensors are flat, contiguous and detached."""

    def __init__(self, layout: Layout, native: Callable[[torch.device], Native], bridge: Bridge) -> None:
        self.layout, self._native, self._bridge = layout, native, bridge

    # -- one message each way -----------------------------------------------------------------------------------

    def send(self, data: torch.Tensor, peer: int, run: Run) -> Message:
        work = HetWork(run.what, [data])
        return self._bridge.send(data, peer, tag=0, kind=COLLECTIVE, work=work, deadline=run.deadline)

    def recv(self, data: torch.Tensor, peer: int, run: Run, **how: Any) -> Message:
        work = HetWork(run.what, [data])
        return self._bridge.recv(data, peer, tag=0, kind=COLLECTIVE, work=work, deadline=run.deadline, **how)

    def _settle(self, messages: Sequence[Message], run: Run) -> None:
        for message in messages:
            message.work.wait()

    def _partner(self, island: int) -> int:
        """The rank of another island that this rank hears from on the flat path."""
        members = self.layout.islands[island]
        return members[self.layout.place % len(members)]

    def _listeners(self, island: int) -> list[int]:
        """The ranks of another island whose partner is this rank."""
        size = len(self.layout.mine)
        return [r for i, r in enumerate(self.layout.islands[island]) if i % size == self.layout.place]

    # -- reductions ---------------------------------------------------------------------------------------------

    def all_reduce(self, data: torch.Tensor, how: Reduction, run: Run) -> None:
        """Every rank ends with the reduction of all ranks' `data`, the same bits everywhere."""
        how.before(data)
        if data.numel() * data.element_size() <= FLAT_BYTES:
            self._all_reduce_flat(data, how, run)
        else:
            self._all_reduce_staged(data, how, run)
        how.after(data, self.layout.size)

    def _all_reduce_flat(self, data: torch.Tensor, how: Reduction, run: Run) -> None:
        settle(self._native(data.device).all_reduce(data, how.native), run.deadline, what=run.what)
        self._add_up(data, self._exchange_whole(data, run), how)

    def _exchange_whole(self, data: torch.Tensor, run: Run) -> list[torch.Tensor]:
        """The island results of all other islands, in island order, for this island's own."""
        got = [torch.empty_like(data) for _ in self.layout.foreign]
        moves = [self.send(data, peer, run) for i in self.layout.foreign for peer in self._listeners(i)]
        moves += [self.recv(t, self._partner(i), run) for i, t in zip(self.layout.foreign, got, strict=True)]
        self._settle(moves, run)
        return got

    def _add_up(self, data: torch.Tensor, others: list[torch.Tensor], how: Reduction) -> None:
        """Combine in island order on every rank, so that all islands round alike."""
        parts = list(others)
        parts.insert(self.layout.home, data)
        if self.layout.home == 0:
            for part in parts[1:]:
                how.combine(data, part)
            return
        total = parts[0]
        for part in parts[1:]:
            how.combine(total, part)
        data.copy_(total)

    def _all_reduce_staged(self, data: torch.Tensor, how: Reduction, run: Run) -> None:
        native, size = self._native(data.device), len(self.layout.mine)
        for first, past in self._spans(data):
            part = data[first:past]
            count = part.numel()
            whole = _padded(part, self.layout.common_parts)
            shard = torch.empty(whole.numel() // size, dtype=data.dtype, device=data.device)
            settle(native.reduce_scatter(shard, whole, how.native), run.deadline, what=run.what)
            self._exchange_shard(shard, whole.numel(), how, run)
            settle(native.all_gather(whole, shard), run.deadline, what=run.what)
            if whole.data_ptr() != part.data_ptr():
                part.copy_(whole[:count])

    def _spans(self, data: torch.Tensor) -> list[tuple[int, int]]:
        """Intervals that give each rank of the smallest island about one chunk."""
        parts = self.layout.common_parts
        each = CHUNK_BYTES // data.element_size() * min(len(i) for i in self.layout.islands)
        return list(pieces(data.numel(), max(each // parts * parts, parts)))

    def _exchange_shard(self, shard: torch.Tensor, total: int, how: Reduction, run: Run) -> None:
        """Swap and combine the parts of this rank's shard with whoever holds them in the other islands."""
        start = self.layout.place * shard.numel()
        mine = (start, start + shard.numel())
        got, moves = [], []
        for island in self.layout.foreign:
            members = self.layout.islands[island]
            other = torch.empty_like(shard)
            for index, (first, past) in overlaps(mine, shares(total, len(members))):
                moves.append(self.send(shard[first - start : past - start], members[index], run))
                moves.append(self.recv(other[first - start : past - start], members[index], run))
            got.append(other)
        self._settle(moves, run)
        self._add_up(shard, got, how)

    # -- copies -------------------------------------------------------------------------------------------------

    def broadcast(self, data: torch.Tensor, root: int, run: Run) -> None:
        """Every rank ends with the root's `data` (any dtype, seen as bytes)."""
        native, layout = self._native(data.device), self.layout
        origin = layout.island_of[root]
        if layout.home == origin:
            settle(native.broadcast(data, layout.mine.index(root)), run.deadline, what=run.what)
            senders = layout.mine
            moves = [
                self.send(data, layout.islands[i][0], run)
                for i in layout.foreign
                if senders[i % len(senders)] == layout.rank
            ]
            self._settle(moves, run)
            return
        senders = layout.islands[origin]
        if layout.place == 0:
            self._settle([self.recv(data, senders[layout.home % len(senders)], run)], run)
        settle(native.broadcast(data, 0), run.deadline, what=run.what)

    def exchange(self, out: list[torch.Tensor], data: list[torch.Tensor], run: Run) -> None:
        """`data[r]` goes to rank r, `out[r]` comes from rank r; flat tensors, sizes agreed, any may be empty."""
        layout = self.layout
        moves = [self.send(data[r], r, run) for r in range(layout.size) if not layout.local(r) and data[r].numel()]
        moves += [self.recv(out[r], r, run) for r in range(layout.size) if not layout.local(r) and out[r].numel()]
        self._exchange_inside([out[r] for r in layout.mine], [data[r] for r in layout.mine], run)
        self._settle(moves, run)

    def _exchange_inside(self, out: list[torch.Tensor], data: list[torch.Tensor], run: Run) -> None:
        native = self._native(data[0].device)
        sent, got = torch.cat(data), torch.empty(sum(t.numel() for t in out), dtype=out[0].dtype, device=out[0].device)
        counts, out_counts = [t.numel() for t in data], [t.numel() for t in out]
        settle(native.all_to_all(got, sent, out_counts=out_counts, counts=counts), run.deadline, what=run.what)
        for target, part in zip(out, got.split(out_counts), strict=True):
            target.copy_(part)

    def all_gather(self, out: list[torch.Tensor], data: torch.Tensor, run: Run) -> None:
        """`out[r]` becomes rank r's `data`; flat tensors of equal size."""
        layout, native = self.layout, self._native(data.device)
        block = torch.empty(len(layout.mine) * data.numel(), dtype=data.dtype, device=data.device)
        moves = []
        for i in layout.foreign:
            moves += [self.send(data, peer, run) for peer in layout.islands[i]]
            moves += [self.recv(out[peer], peer, run) for peer in layout.islands[i]]
        settle(native.all_gather(block, data), run.deadline, what=run.what)
        for rank, part in zip(layout.mine, block.split(data.numel()) if data.numel() else [], strict=False):
            out[rank].copy_(part)
        self._settle(moves, run)

    def barrier(self, run: Run) -> None:
        """Nobody leaves before everybody has come."""
        token = torch.zeros(1, dtype=torch.int32)
        native = self._native(token.device)
        settle(native.all_reduce(token, _SUM), run.deadline, what=run.what)
        self._exchange_whole(token, run)
        settle(native.all_reduce(token, _SUM), run.deadline, what=run.what)


_SUM = torch.distributed.ReduceOp.SUM


def _padded(part: torch.Tensor, parts: int) -> torch.Tensor:
    """`part` itself where its length divides by `parts`, else a copy with a tail that nobody reads."""
    lacking = -part.numel() % parts
    return part if not lacking else torch.nn.functional.pad(part, (0, lacking))
