"""The `het` back end of torch.distributed: the c10d face over collectives and bridges.

A group inside one island is the native group itself; a group across islands is a HetGroup.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.c10d import PrefixStore, ProcessGroup, Store, Work
from hetctl.comm.collectives import Collectives, Run
from hetctl.comm.forwarded import METER, P2P, Bridge
from hetctl.comm.islands import Native, make_native
from hetctl.comm.layout import Layout
from hetctl.comm.placement import Placement, current_placement
from hetctl.comm.reductions import Reduction, reduction
from hetctl.comm.runner import Runner
from hetctl.comm.work import BridgeError, Deadline, HetWork

NAME = "het"


def register() -> None:
    """Make the word `het` known to torch.distributed; calling it again changes nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def bridge_bytes() -> int:
    """Bytes of tensors that this rank sent across islands since it started."""
    return METER.sent


def create(options: Any, backend_options: Any = None) -> Any:
    """The process group for `options.global_ranks_in_group`: native inside one island, else a HetGroup."""
    placement = current_placement()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if len(placement.islands_of(ranks)) == 1:
        return _native_group(options, ranks, placement)
    return HetGroup(options, ranks, placement)


def _native_group(options: Any, ranks: tuple[int, ...], placement: Placement) -> Any:
    backend = placement.island_of_rank[ranks[0]].torch_backend
    rank, size, timeout = options.group_rank, options.group_size, options.timeout

    def native(name: str) -> Any:
        store = PrefixStore(f"{name}/", options.store)
        made = make_native(store, name, place=rank, size=size, timeout=timeout)
        made.options.global_ranks_in_group = list(ranks)
        made.options.group_name = options.group_id
        made._set_sequence_number_for_group()
        return made

    if backend == "gloo":
        return native("gloo")
    # host tensors (object collectives, checkpoints) need gloo beside the device's own library
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, native(backend))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, native("gloo"))
    return group


class HetGroup(ProcessGroup):  # type: ignore[misc]
    """A process group across islands, serving host and device tensors."""

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(self, options: Any, ranks: tuple[int, ...], placement: Placement) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._ranks, self._placement = ranks, placement
        self._timeout: timedelta = options.timeout
        self._name, self._desc = str(options.group_id or NAME), NAME
        self._store = options.store
        self._layout = _layout(self._rank, ranks, placement)
        self._natives: dict[str, Native] = {}
        self._bridge = Bridge(
            self._rank, self._store, timeout=self._timeout, verify=placement.verify_bridge, who=self._who
        )
        self._make_natives()
        self._collectives = Collectives(self._layout, self._native, self._bridge)
        self._runner = Runner(f"het collectives {self._name}")
        self._count = 0

    def _make_natives(self) -> None:
        island = self._placement.island_of_rank[self._ranks[self._rank]]
        for name, device in {
            (island.torch_backend, "cuda" if island.torch_backend != "gloo" else "cpu"),
            ("gloo", "cpu"),
        }:
            store = PrefixStore(f"native/{name}/{self._layout.home}/", self._store)
            size = len(self._layout.mine)
            made = None
            if size > 1:
                made = make_native(store, name, place=self._layout.place, size=size, timeout=self._timeout)
            self._natives[device] = Native(made, size=size)

    def _native(self, device: torch.device) -> Native:
        native = self._natives.get(device.type)
        if native is None:
            raise BridgeError(f"tensors on '{device.type}' have no native communicator in this island")
        return native

    def _who(self, rank: int) -> str:
        world = self._ranks[rank]
        hosts = self._placement.hosts
        return f"rank {world}" + (f" on {hosts[world]}" if world < len(hosts) else "")

    # -- what c10d asks of a group ------------------------------------------------------------------------------

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)

    getRank, getSize = rank, size

    def name(self) -> str:
        return NAME

    getBackendName = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    setGroupName = _set_group_name
    group_name = property(getGroupName)

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    def getGroupDesc(self) -> str:
        return self._desc

    setGroupDesc = _set_group_desc
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return NAME

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self._natives)]

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch: list[HetWork] | None = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._batch = self._batch or [], None
        return _Together(works)

    def shutdown(self) -> None:
        """Finish what is queued, then end threads and connections."""
        self._runner.close(seconds=self._timeout.total_seconds())
        self._bridge.close()
        for native in self._natives.values():
            if native.group is not None:
                native.group.shutdown()
        self._natives = {}

    def abort(self) -> None:
        self._bridge.fail(BridgeError("the process group was aborted"))

    # -- running ------------------------------------------------------------------------------------------------

    def _deadline(self, opts: Any) -> Deadline:
        asked = getattr(opts, "timeout", None)
        return Deadline((asked if asked and asked.total_seconds() > 0 else self._timeout).total_seconds())

    def _submit(
        self, name: str, call: Callable[[Run], None], tensors: Sequence[torch.Tensor], outputs: Sequence[Any], opts: Any
    ) -> HetWork:
        """Queue a collective. `tensors` are all it touches: their devices' streams are kept in order."""
        self._count += 1
        run = Run(f"{name} {self._count} of group '{self._name}'", self._deadline(opts))
        work = HetWork(run.what, outputs)
        device = tensors[0].device if tensors else torch.device("cpu")
        self._runner.put(work, lambda: call(run), device=device)
        return work

    # -- point to point -----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        if self._layout.local(dst):
            return self._native(tensors[0].device).group.send(tensors, self._layout.mine.index(dst), tag)
        work = HetWork(f"send to {self._who(dst)}", tensors)
        data = tensors[0].detach().contiguous().view(-1)
        self._bridge.send(data, dst, tag=tag, kind=P2P, work=work, deadline=self._deadline(None))
        return work

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        if self._layout.local(src):
            return self._native(tensors[0].device).group.recv(tensors, self._layout.mine.index(src), tag)
        target = tensors[0].detach()
        data = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        work = HetWork(f"receive from {self._who(src)}", tensors)
        if data is not target:
            work = _copying_back(work, target, data)
        work.source = src
        self._bridge.recv(data.view(-1), src, tag=tag, kind=P2P, work=work, deadline=self._deadline(None))
        return work

    # -- collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        how = _reduction(opts)

        def call(run: Run) -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    self._collectives.all_reduce(flat, how, run)

        return self._submit("all_reduce", call, tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        root = opts.rootRank if opts is not None else 0

        def call(run: Run) -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    self._collectives.broadcast(flat.view(torch.uint8), root, run)

        return self._submit("broadcast", call, tensors, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        how, root = _reduction(opts), opts.rootRank

        def call(run: Run) -> None:
            for tensor in tensors:
                flat = tensor.detach().reshape(-1).clone()
                self._collectives.all_reduce(flat, how, run)
                if self._rank == root:
                    tensor.detach().copy_(flat.view_as(tensor))

        return self._submit("reduce", call, tensors, tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def call(run: Run) -> None:
            for outs, data in zip(outputs, inputs, strict=True):
                self._gather_all(outs, data, run)

        return self._submit("all_gather", call, inputs, [t for outs in outputs for t in outs], opts)

    def _gather_all(self, outs: list[torch.Tensor], data: torch.Tensor, run: Run) -> None:
        sent = _bytes(data)
        got = [torch.empty_like(sent) for _ in outs]
        self._collectives.all_gather(got, sent, run)
        for out, part in zip(outs, got, strict=True):
            out.detach().copy_(part.view(out.dtype).view_as(out))

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self.allgather([list(o) for o in outputs], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [data], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def call(run: Run) -> None:
            for out, data in zip(outputs, inputs, strict=True):
                with _Flat(out) as flat:
                    count = data.numel()
                    parts = [flat[i * count : (i + 1) * count] for i in range(self._size)]
                    self._gather_all([p.view(-1) for p in parts], data.reshape(-1), run)

        return self._submit("all_gather_single", call, inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        def call(run: Run) -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                self._reduce_scatter(out, torch.cat([p.detach().reshape(-1) for p in parts]), opts, run)

        return self._submit("reduce_scatter", call, outputs, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def call(run: Run) -> None:
            for out, data in zip(outputs, inputs, strict=True):
                self._reduce_scatter(out, data.detach().reshape(-1).clone(), opts, run)

        return self._submit("reduce_scatter_single", call, outputs, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, opts: Any, run: Run) -> None:
        self._collectives.all_reduce(whole, _reduction(opts), run)
        mine = whole[self._rank * out.numel() : (self._rank + 1) * out.numel()]
        out.detach().copy_(mine.view_as(out))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, data in enumerate(inputs):
                sent = _bytes(data)
                none = sent[:0]
                got = [torch.empty_like(sent) if self._rank == root else none for _ in range(self._size)]
                self._collectives.exchange(got, [sent if r == root else none for r in range(self._size)], run)
                for out, part in zip(outputs[index] if self._rank == root else [], got, strict=False):
                    out.detach().copy_(part.view(out.dtype).view_as(out))

        return self._submit("gather", call, inputs, [t for outs in outputs for t in outs], opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, out in enumerate(outputs):
                got = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8, device=out.device)
                none = got[:0]
                sent = [_bytes(t) for t in inputs[index]] if self._rank == root else [none] * self._size
                self._collectives.exchange([got if r == root else none for r in range(self._size)], sent, run)
                out.detach().copy_(got.view(out.dtype).view_as(out))

        return self._submit("scatter", call, outputs, outputs, opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def call(run: Run) -> None:
            got = [torch.empty(t.numel() * t.element_size(), dtype=torch.uint8, device=t.device) for t in outputs]
            self._collectives.exchange(got, [_bytes(t) for t in inputs], run)
            for out, part in zip(outputs, got, strict=True):
                out.detach().copy_(part.view(out.dtype).view_as(out))

        return self._submit("all_to_all", call, outputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        out_splits: Sequence[int] = (),
        splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        outputs = _rows(output.detach(), out_splits, self._size)
        inputs = _rows(data.detach(), splits, self._size)
        return self.alltoall(outputs, inputs, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._submit("barrier", self._collectives.barrier, [], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)


class _Together(HetWork):
    """Several operations waited for as one."""

    def __init__(self, works: Sequence[HetWork]) -> None:
        super().__init__("coalesced operations", [t for w in works for t in w.result()])
        self._works = works
        self._left = len(works)
        for work in works:
            work.on_end(self._one)
        if not works:
            self.finish()

    def _one(self) -> None:
        self._left -= 1
        if self._left == 0:
            errors = [e for e in (w.exception() for w in self._works) if e is not None]
            self.finish(error=errors[0] if errors else None)

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()


class _Flat:
    """A tensor as a flat contiguous one; what was changed is copied back where memory is not shared."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous().view(-1)

    def __enter__(self) -> torch.Tensor:
        return self._flat

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view_as(self._tensor))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _rows(tensor: torch.Tensor, splits: Sequence[int], parts: int) -> list[torch.Tensor]:
    """Consecutive rows of dimension 0 for each rank; equal counts where no splits are given."""
    if not splits:
        return list(tensor.split(tensor.size(0) // parts)) if tensor.numel() else [tensor] * parts
    return list(tensor.split(list(splits)))


def _copying_back(work: HetWork, target: torch.Tensor, data: torch.Tensor) -> HetWork:
    ended = work.finish
    weak = weakref.ref(work)

    def finish(*, ready: Any = None, error: BaseException | None = None) -> None:
        if error is None and weak() is not None:
            if ready is not None:
                ready.synchronize()
            target.copy_(data.view_as(target))
        ended(ready=None, error=error)

    work.finish = finish  # type: ignore[method-assign]
    return work


def _layout(rank: int, ranks: tuple[int, ...], placement: Placement) -> Layout:
    position = {world: index for index, world in enumerate(ranks)}
    islands = placement.islands_of(ranks)
    return Layout(rank, tuple(tuple(position[w] for w in members) for members in islands.values()))


def _reduction(options: Any) -> Reduction:
    return reduction(options.reduceOp if options is not None else dist.ReduceOp.SUM)
