"""torch's calls for collectives, by their names up to torch 2.12 and the newer ones, as calls of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.group.c10d_identity import Identity
from hetctl.comm.group.call_order import CallOrder
from hetctl.comm.group.collectives import Collectives, check_sparse, is_even, is_small, sum_sparse
from hetctl.comm.group.reductions import Reduction, check, reduction
from hetctl.comm.group.runner import Part, Runner
from hetctl.comm.group.steps import Run
from hetctl.comm.operation.device import settle_current_stream
from hetctl.comm.operation.recorder import RECORDER, RecordedOperation
from hetctl.comm.operation.views import Flat, as_bytes, fill, flat_copy, is_plain, memory_of, plain, room_for, rows
from hetctl.comm.operation.work import BridgeError, HetWork, OperationDeadline

HALVES = (torch.float16, torch.complex32)  # averages of these are of scaled numbers, as NCCL's are


class Operations(Identity):
    """The collectives of c10d; each queues a call that turns tensors into flat memory and back."""

    _calls: CallOrder
    _collectives: Collectives
    _runner: Runner
    _ranks: tuple[int, ...]

    def _submit(
        self,
        name: str,
        call: Callable[[Run], Iterable[Part] | None],
        *,
        touched: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor] | None = None,
        outputs: Sequence[torch.Tensor],
        opts: Any,
        parted: bool = False,
    ) -> Any:
        """Queue a collective; `touched` are the tensors it reads or writes, `outputs` what its handle returns.

        A `parted` one yields what later ones may overtake. Profilers see the shapes of `shown`, by default all it
        touches.
        """
        check_plain_values(touched)
        if self._runner.is_here():
            raise BridgeError(
                f"{name} in a callback of another collective of group '{self._name}': "
                "ranks would disagree on its place in the order of the group's collectives",
                hint="begin it where the program waits for the other one, or in a group of its own",
            )
        self._count += 1
        run = Run(f"{name} {self._count} of group '{self._name}'", self._deadline(opts))
        work = HetWork(run.what, outputs, deadline=run.deadline)
        self._calls.add(self._count, self._record(work, name, peer=None, tensors=touched if shown is None else shown))
        waited = not getattr(opts, "asyncOp", True)
        self._runner.put(work, lambda: call(run), touched=touched, waited=waited, parted=parted)
        return self._noted(work)

    def _record(
        self, work: HetWork, name: str, *, peer: int | None, tensors: Sequence[torch.Tensor]
    ) -> RecordedOperation:
        """Let the flight recorder and a profiler see the operation."""
        work.show(name, tensors)
        world = None if peer is None else self._ranks[peer]
        entry = RECORDER.begin(
            name, group=self._name, peer=world, nbytes=sum(t.numel() * t.element_size() for t in tensors)
        )
        work.on_end(lambda: entry.end(work.exception()))
        return entry

    def _noted(self, work: Any) -> Any:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _deadline(self, opts: Any) -> OperationDeadline:
        asked = getattr(opts, "timeout", None)
        return OperationDeadline((asked if asked and asked.total_seconds() > 0 else self._timeout).total_seconds())

    def _reduction(self, opts: Any, tensors: Sequence[torch.Tensor]) -> Reduction:
        """The reduction asked for. Raises TypeError where these tensors do not allow it."""
        op, how = _op(opts), reduction(_op(opts))
        lines = self._collectives
        alone = all(len(island) == 1 for island in lines.layout.islands)
        for tensor in tensors:
            check(op, tensor, alone=alone, device_types=lines.device_types)
        if how.mean and all(t.dtype in HALVES and not t.is_sparse for t in tensors):  # the sum may be beyond them
            return replace(how, mean=False, scale=1 / self._size)
        return how

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        how = self._reduction(opts, tensors)
        if any(tensor.is_sparse for tensor in tensors):
            check_sparse(_op(opts))

        def call(run: Run) -> Iterator[Part]:
            for tensor in tensors:
                if tensor.is_sparse:
                    sum_sparse(tensor, how, self._collectives, run)
                    continue
                flat = Flat(tensor)
                yield from self._collectives.all_reduce(flat.values, how, run)
                yield None, flat.put_back

        parted = not any(t.is_sparse for t in tensors) and not all(map(is_small, tensors))
        return self._submit("all_reduce", call, touched=tensors, outputs=tensors, opts=opts, parted=parted)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        root = opts.rootRank if opts is not None else 0

        def call(run: Run) -> Iterator[Part]:
            for tensor in tensors:
                flat = Flat(tensor)
                yield from self._collectives.broadcast(flat.values.view(torch.uint8), root, run)
                yield None, flat.put_back

        parted = not all(map(is_small, tensors))
        return self._submit("broadcast", call, touched=tensors, outputs=tensors, opts=opts, parted=parted)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        how, root = self._reduction(opts, tensors), opts.rootRank

        def call(run: Run) -> Iterator[Part]:
            for tensor in tensors:
                flat = flat_copy(tensor)
                yield from self._collectives.reduce(flat, how, root=root, run=run)
                if self._rank == root:
                    yield None, functools.partial(fill, tensor, flat.view(torch.uint8))

        parted = not all(map(is_small, tensors))
        return self._submit("reduce", call, touched=tensors, outputs=tensors, opts=opts, parted=parted)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        for blocks, data in zip(outputs, inputs, strict=True):
            self._check_blocks(blocks, data)
            _check_size(blocks[self._rank], data.numel())
        return self._all_gather("all_gather", outputs, inputs, opts)

    def _all_gather(
        self, name: str, outputs: Sequence[Sequence[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        def call(run: Run) -> Iterator[Part]:
            for group, data in zip(outputs, inputs, strict=True):
                targets = [as_bytes(t) if is_plain(t) else room_for(t) for t in group]
                yield from self._collectives.all_gather(targets, as_bytes(data), run)
                for out, part in zip(group, targets, strict=True):
                    if not is_plain(out):
                        yield None, functools.partial(fill, out, part)

        outs = [t for group in outputs for t in group]
        parted = not any(map(is_small, inputs)) and all(map(is_even, outputs))
        return self._submit(name, call, touched=[*inputs, *outs], shown=inputs, outputs=outs, opts=opts, parted=parted)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        of_input = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._all_gather("all_gather_coalesced", of_input, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Any:
        return self._all_gather_single("all_gather_single", [output], [data], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self._all_gather_single("all_gather_single_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        def call(run: Run) -> Iterator[Part]:
            for out, data in zip(outputs, inputs, strict=True):
                flat = Flat(out)
                parts = flat.values.view(torch.uint8).view(self._size, -1)
                yield from self._collectives.all_gather(list(parts), as_bytes(data), run)
                yield None, flat.put_back

        for out, data in zip(outputs, inputs, strict=True):
            _check_size(out, data.numel() * self._size)
            _check_types([out, data])
        parted = not any(map(is_small, inputs))
        return self._submit(
            name, call, touched=[*inputs, *outputs], shown=inputs, outputs=outputs, opts=opts, parted=parted
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter("reduce_scatter_single", [output], [self._blocks(data)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, [self._blocks(t) for t in inputs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _blocks(self, data: torch.Tensor) -> list[torch.Tensor]:
        return list(plain(data).view(self._size, -1))

    def _reduce_scatter(
        self, name: str, outputs: list[torch.Tensor], inputs: Sequence[list[torch.Tensor]], opts: Any
    ) -> Any:
        how = self._reduction(opts, outputs)

        def call(run: Run) -> Iterator[Part]:
            for out, parts in zip(outputs, inputs, strict=True):
                flat = Flat(out)
                yield from self._collectives.reduce_scatter(flat.values, [plain(p).view(-1) for p in parts], how, run)
                yield None, flat.put_back

        for out, parts in zip(outputs, inputs, strict=True):
            self._check_blocks(parts, out)
            _check_size(out, parts[self._rank].numel())
        given = [t for parts in inputs for t in parts]
        parted = not any(map(is_small, given)) and all(map(is_even, inputs))
        return self._submit(
            name, call, touched=[*outputs, *given], shown=given, outputs=outputs, opts=opts, parted=parted
        )

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, data in enumerate(inputs):
                sent = as_bytes(data)
                got = [room_for(t) for t in outputs[index]] if self._rank == root else [sent[:0]] * self._size
                self._collectives.exchange(got, [sent if r == root else sent[:0] for r in range(self._size)], run)
                for out, part in zip(outputs[index] if self._rank == root else [], got, strict=False):
                    fill(out, part)

        for blocks, data in zip(outputs, inputs, strict=False):  # there are none but at the root
            self._check_blocks(blocks, data, alike=True)
        outs = [t for group in outputs for t in group]
        return self._submit("gather", call, touched=[*inputs, *outs], shown=inputs, outputs=outs, opts=opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, out in enumerate(outputs):
                got = room_for(out)
                sent = [as_bytes(t) for t in inputs[index]] if self._rank == root else [got[:0]] * self._size
                self._collectives.exchange([got if r == root else got[:0] for r in range(self._size)], sent, run)
                fill(out, got)

        for parts, out in zip(inputs, outputs, strict=False):  # there are none but at the root
            self._check_blocks(parts, out, alike=True)
        given = [t for parts in inputs for t in parts]
        return self._submit("scatter", call, touched=[*outputs, *given], shown=given, outputs=outputs, opts=opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        return self._all_to_all("all_to_all", outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        out_splits: Sequence[int] = (),
        splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        outputs = rows(memory_of(output), out_splits, self._size)
        inputs = rows(memory_of(data), splits, self._size)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], opts)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        def call(run: Run) -> None:
            got = [room_for(t) for t in outputs]
            self._collectives.exchange(got, [as_bytes(t) for t in inputs], run)
            for out, part in zip(outputs, got, strict=True):
                fill(out, part)

        for blocks in (outputs, inputs):
            self._check_blocks(blocks, inputs[0] if inputs else None)
        _check_size(outputs[self._rank], inputs[self._rank].numel())
        return self._submit(name, call, touched=[*outputs, *inputs], shown=inputs, outputs=shown, opts=opts)

    def barrier(self, opts: Any = None) -> Any:
        settle_current_stream()
        return self._submit("barrier", self._collectives.barrier, touched=[], outputs=[], opts=opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout or self._timeout)

    def _check_blocks(self, blocks: Sequence[torch.Tensor], like: torch.Tensor | None, *, alike: bool = False) -> None:
        """Raises ValueError or TypeError where there is not one tensor a rank, or not of one type (or size)."""
        if len(blocks) != self._size:
            raise ValueError(f"{len(blocks)} tensors were given for the {self._size} ranks of the group")
        if like is None:
            return
        _check_types([*blocks, like])
        for block in blocks if alike else ():
            _check_size(block, like.numel())


def _check_types(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError where tensors of one operation are of several types: bytes would be taken for other values."""
    kinds = {t.dtype for t in tensors}
    if len(kinds) > 1:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise TypeError(f"the tensors of one collective are of one type, not of {names}")


def _check_size(out: torch.Tensor, count: int) -> None:
    """Raises ValueError where an output has not as many elements as there will be."""
    if out.numel() != count:
        raise ValueError(f"an output of {out.numel()} elements cannot hold the {count} of the result")


def _op(opts: Any) -> Any:
    """The reduction, which a caller of a group's own method may give in place of options, as in c10d's."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def check_plain_values(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError for quantized tensors: their bytes mean nothing without their scales."""
    if any(t.is_quantized for t in tensors):
        raise TypeError("quantized tensors cannot be exchanged: send their int_repr(), scales and zero points")
