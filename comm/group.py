"""The c10d face: a ProcessGroup across islands that turns torch's calls into collectives and bridge messages.

Nothing else knows c10d's method names (both the names up to torch 2.12 and the newer ones), options and quirks.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.alarm import Alarm
from hetctl.comm.anysource import AnySource
from hetctl.comm.bridge import P2P, Bridge, Transport
from hetctl.comm.c10d import PrefixStore, ProcessGroup, Store, Work
from hetctl.comm.cluster import TransportKind
from hetctl.comm.collectives import Collectives
from hetctl.comm.islands import Native, break_native, make_native
from hetctl.comm.layout import Layout
from hetctl.comm.lines import Run
from hetctl.comm.local import NativeMessage
from hetctl.comm.placement import Placement
from hetctl.comm.rails import RailTransport
from hetctl.comm.recorder import RECORDER
from hetctl.comm.reductions import Reduction, reduction
from hetctl.comm.runner import Runner
from hetctl.comm.shm import ShmTransport
from hetctl.comm.sparse import sum_sparse
from hetctl.comm.views import Flat, Returning, as_bytes, fill, flat_copy, is_plain, plain, room_for, rows
from hetctl.comm.work import BridgeError, Deadline, HetWork, Together


class _Identity(ProcessGroup):  # type: ignore[misc]
    """What c10d asks of a group besides operations. A Python group has no C++ part that would remember its name."""

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    _rank: int
    _size: int
    _name: str
    _desc = "het"
    _count = 0
    _natives: dict[str, Native]
    _store: Store
    _timeout: timedelta
    _batch: list[Any] | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "het"

    getBackendName = name
    _get_backend_name = name

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

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self._natives)]

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._batch = self._batch or [], None
        return Together(works)


class HetGroup(_Identity):
    """A process group across islands, serving host and device tensors."""

    def __init__(self, options: Any, ranks: tuple[int, ...], placement: Placement) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._ranks, self._placement = ranks, placement
        self._timeout, self._name = options.timeout, str(options.group_id or "het")
        self._store = options.store
        self._layout = _layout(self._rank, ranks, placement)
        self._natives = {}
        self._make_natives()
        names = [self._who(r) for r in range(self._size)]
        self._alarm = Alarm(self._store, rank=self._rank, names=names, on_verdict=self._end_all)
        self._alarm.watch()
        self._transports: dict[TransportKind, Transport] = {}
        self._bridge = Bridge(
            self._rank,
            self._store,
            timeout=self._timeout,
            verify=placement.verify_bridge,
            who=self._who,
            transport_to=self._transport_to,
            on_error=self._alarm.ring,
        )
        self._collectives = Collectives(self._layout, self._native, self._bridge)
        self._any = AnySource(self._post_unbounded, tuple(r for r in range(self._size) if r != self._rank))
        self._runner = Runner(f"het collectives {self._name}", on_error=self._alarm.ring)

    def _make_natives(self) -> None:
        island = self._placement.island_of_rank[self._ranks[self._rank]]
        size = len(self._layout.mine)
        for name in sorted({island.torch_backend, "gloo"}):
            store = PrefixStore(f"native/{name}/{self._layout.home}/", self._store)
            made = None
            if size > 1:
                made = make_native(store, name, place=self._layout.place, size=size, timeout=self._timeout)
            self._natives["cpu" if name == "gloo" else "cuda"] = Native(made, size=size)

    def _transport_to(self, peer: int) -> Transport:
        """The transport that the plan gives the pair of islands; one object for each kind."""
        place = self._placement.island_of_rank
        kind = self._placement.transport(place[self._ranks[self._rank]].name, place[self._ranks[peer]].name)
        if kind not in ("shm", "tcp"):
            warnings.warn(f"the 'het' back end has no '{kind}' transport: this bridge takes tcp", stacklevel=2)
            kind = "tcp"
        if kind not in self._transports:
            self._transports[kind] = ShmTransport() if kind == "shm" else RailTransport()
        return self._transports[kind]

    def _native(self, device: torch.device) -> Native:
        native = self._natives.get(device.type)
        if native is None:
            raise BridgeError(f"tensors on '{device.type}' have no native communicator in this rank's island")
        return native

    def _who(self, rank: int) -> str:
        world, hosts = self._ranks[rank], self._placement.hosts
        return f"rank {world}" + (f" on {hosts[world]}" if world < len(hosts) else "")

    def _end_all(self, error: BridgeError) -> None:
        """The verdict on a failure anywhere: end what is pending, native parts too, and keep a record."""
        self._break(error)
        RECORDER.dump(self._ranks[self._rank], reason=str(error))

    def _break(self, error: BridgeError) -> None:
        self._runner.fail(error)
        self._bridge.fail(error)
        for native in list(self._natives.values()):
            break_native(native)

    def shutdown(self) -> None:
        """Finish what is queued, then end threads and connections."""
        if self._any.under_way():  # receives that nothing will answer any more
            self._break(BridgeError(f"the process group '{self._name}' was destroyed"))
        seconds = 1.0 if self._bridge.error is not None else self._timeout.total_seconds()
        self._runner.close(seconds=seconds)
        self._bridge.close(seconds=seconds)
        self._alarm.close()
        for native in self._natives.values():
            if native.group is not None:
                native.group.shutdown()
        self._natives = {}

    def abort(self) -> None:
        """End everything pending with an error, here and at the peers."""
        self._end_all(BridgeError(f"the process group '{self._name}' was aborted"))

    def _deadline(self, opts: Any) -> Deadline:
        asked = getattr(opts, "timeout", None)
        return Deadline((asked if asked and asked.total_seconds() > 0 else self._timeout).total_seconds())

    def _submit(
        self,
        name: str,
        call: Callable[[Run], None],
        *,
        touched: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor] | None = None,
        outputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        """Queue a collective; `touched` are the tensors it reads or writes, `outputs` what its handle returns.

        Profilers see the shapes of `shown`, by default of all it touches.
        """
        self._count += 1
        run = Run(f"{name} {self._count} of group '{self._name}'", self._deadline(opts))
        work = HetWork(run.what, outputs, deadline=run.deadline)
        self._record(work, name, peer=None, tensors=touched if shown is None else shown)
        self._runner.put(work, lambda: call(run), touched=touched, waited=not getattr(opts, "asyncOp", True))
        return self._noted(work)

    def _record(self, work: HetWork, name: str, *, peer: int | None, tensors: Sequence[torch.Tensor]) -> None:
        """Let the flight recorder and a profiler see the operation."""
        work.show(name, tensors)
        world = None if peer is None else self._ranks[peer]
        entry = RECORDER.begin(
            name, group=self._name, peer=world, nbytes=sum(t.numel() * t.element_size() for t in tensors)
        )
        work.on_end(lambda: entry.end(work.exception()))

    def _noted(self, work: Any) -> Any:
        if self._batch is not None:
            self._batch.append(work)
        return work

    # -- point to point

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        data, deadline, what = plain(tensors[0]), self._deadline(None), f"send to {self._who(dst)}"
        if self._layout.local(dst):
            native = self._native(data.device).group.send([data], self._layout.mine.index(dst), tag)
            return self._local(what, tensors, native, peer=dst, deadline=deadline)
        work = HetWork(what, tensors, deadline=deadline)
        self._record(work, "send", peer=dst, tensors=tensors)
        self._bridge.send(data.view(-1), dst, tag=tag, kind=P2P, work=work, deadline=deadline)
        return self._noted(work)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        target, deadline, what = tensors[0].detach(), self._deadline(None), f"recv from {self._who(src)}"
        work = HetWork(what, tensors, deadline=deadline)
        if self._any.claims(target, src, tag, work):
            return self._noted(work)
        if self._layout.local(src):
            native = self._native(target.device).group.recv([target], self._layout.mine.index(src), tag)
            return self._local(what, tensors, native, peer=src, deadline=deadline)
        data = target if is_plain(target) else torch.empty_like(target, memory_format=torch.contiguous_format)
        if data is not target:
            work = Returning(what, target, data, deadline)
        work.source = src
        self._record(work, "recv", peer=src, tensors=tensors)
        self._bridge.recv(data.view(-1), src, tag=tag, kind=P2P, work=work, deadline=deadline)
        return self._noted(work)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first, as gloo can (and device libraries cannot)."""
        if tensors[0].is_cuda:
            raise BridgeError("a receive from any source needs a host tensor: device libraries know none")
        work = HetWork("recv from any rank", tensors, deadline=self._deadline(None))
        self._record(work, "recvAnySource", peer=None, tensors=tensors)
        self._any.recv(tensors[0].detach(), tag, work)
        return self._noted(work)

    def _post_unbounded(self, data: torch.Tensor, peer: int, tag: int) -> HetWork:
        """A receive that may stay unanswered for as long as the group lives."""
        forever, what = Deadline(_FOREVER), f"recv from {self._who(peer)} among others"
        if not self._layout.local(peer):
            work = HetWork(what, [data])
            self._bridge.recv(data.view(-1), peer, tag=tag, kind=P2P, work=work, deadline=forever)
            return work
        native = self._native(data.device).group.recv([data], self._layout.mine.index(peer), tag)
        local = NativeMessage(what, [data], native=native, deadline=forever, on_error=BridgeError)
        threading.Thread(target=local.end, name="het any-source", daemon=True).start()
        return local

    def _local(
        self, what: str, tensors: list[torch.Tensor], native: Any, *, peer: int, deadline: Deadline
    ) -> NativeMessage:
        """A native message of this rank's own island, with this group's way of failing."""
        work = NativeMessage(what, tensors, native=native, deadline=deadline, on_error=self._alarm.judged)
        work.source = peer
        self._record(work, what.split()[0], peer=peer, tensors=tensors)
        self._noted(work)
        return work

    # -- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        how = _reduction(opts)

        def call(run: Run) -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    sum_sparse(tensor, self._collectives, run)
                    continue
                with Flat(tensor) as flat:
                    self._collectives.all_reduce(flat, how, run)

        return self._submit("all_reduce", call, touched=tensors, outputs=tensors, opts=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        root = opts.rootRank if opts is not None else 0

        def call(run: Run) -> None:
            for tensor in tensors:
                with Flat(tensor) as flat:
                    self._collectives.broadcast(flat.view(torch.uint8), root, run)

        return self._submit("broadcast", call, touched=tensors, outputs=tensors, opts=opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        how, root = _reduction(opts), opts.rootRank

        def call(run: Run) -> None:
            for tensor in tensors:
                flat = flat_copy(tensor)
                self._collectives.reduce(flat, how, root=root, run=run)
                if self._rank == root:
                    tensor.detach().copy_(flat.view(tensor.shape))

        return self._submit("reduce", call, touched=tensors, outputs=tensors, opts=opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def call(run: Run) -> None:
            for outs, data in zip(outputs, inputs, strict=True):
                self._gather_all(outs, data, run)

        outs = [t for group in outputs for t in group]
        return self._submit("all_gather", call, touched=[*inputs, *outs], shown=inputs, outputs=outs, opts=opts)

    def _gather_all(self, outs: Sequence[torch.Tensor], data: torch.Tensor, run: Run) -> None:
        targets = [as_bytes(t) if is_plain(t) else room_for(t) for t in outs]
        self._collectives.all_gather(targets, as_bytes(data), run)
        for out, part in zip(outs, targets, strict=True):
            if not is_plain(out):
                fill(out, part)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        def call(run: Run) -> None:
            for index, data in enumerate(inputs):
                self._gather_all([of_rank[index] for of_rank in outputs], data, run)

        outs = [t for group in outputs for t in group]
        return self._submit(
            "all_gather_coalesced", call, touched=[*inputs, *outs], shown=inputs, outputs=outs, opts=opts
        )

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self._all_gather_single("all_gather_single", [output], [data], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather_single("all_gather_single_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        def call(run: Run) -> None:
            for out, data in zip(outputs, inputs, strict=True):
                with Flat(out) as flat:
                    parts = flat.view(torch.uint8).view(self._size, -1)
                    self._collectives.all_gather(list(parts), as_bytes(data), run)

        return self._submit(name, call, touched=[*inputs, *outputs], shown=inputs, outputs=outputs, opts=opts)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter("reduce_scatter_single", [output], [self._blocks(data)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, [self._blocks(t) for t in inputs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _blocks(self, data: torch.Tensor) -> list[torch.Tensor]:
        return list(plain(data).view(self._size, -1))

    def _reduce_scatter(
        self, name: str, outputs: list[torch.Tensor], inputs: Sequence[list[torch.Tensor]], opts: Any
    ) -> Work:
        how = _reduction(opts)

        def call(run: Run) -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                with Flat(out) as flat:
                    self._collectives.reduce_scatter(flat, [plain(p).view(-1) for p in parts], how, run)

        given = [t for parts in inputs for t in parts]
        return self._submit(name, call, touched=[*outputs, *given], shown=given, outputs=outputs, opts=opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, data in enumerate(inputs):
                sent = as_bytes(data)
                got = [room_for(t) for t in outputs[index]] if self._rank == root else [sent[:0]] * self._size
                self._collectives.exchange(got, [sent if r == root else sent[:0] for r in range(self._size)], run)
                for out, part in zip(outputs[index] if self._rank == root else [], got, strict=False):
                    fill(out, part)

        outs = [t for group in outputs for t in group]
        return self._submit("gather", call, touched=[*inputs, *outs], shown=inputs, outputs=outs, opts=opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        root = opts.rootRank

        def call(run: Run) -> None:
            for index, out in enumerate(outputs):
                got = room_for(out)
                sent = [as_bytes(t) for t in inputs[index]] if self._rank == root else [got[:0]] * self._size
                self._collectives.exchange([got if r == root else got[:0] for r in range(self._size)], sent, run)
                fill(out, got)

        given = [t for parts in inputs for t in parts]
        return self._submit("scatter", call, touched=[*outputs, *given], shown=given, outputs=outputs, opts=opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._all_to_all("all_to_all", outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        out_splits: Sequence[int] = (),
        splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        outputs = rows(output.detach(), out_splits, self._size)
        inputs = rows(data.detach(), splits, self._size)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], opts)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor],
        opts: Any,
    ) -> Work:
        def call(run: Run) -> None:
            got = [room_for(t) for t in outputs]
            self._collectives.exchange(got, [as_bytes(t) for t in inputs], run)
            for out, part in zip(outputs, got, strict=True):
                fill(out, part)

        return self._submit(name, call, touched=[*outputs, *inputs], shown=inputs, outputs=shown, opts=opts)

    def barrier(self, opts: Any = None) -> Work:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._submit("barrier", self._collectives.barrier, touched=[], outputs=[], opts=opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout or self._timeout)


_FOREVER = 3e8  # seconds


def _layout(rank: int, ranks: tuple[int, ...], placement: Placement) -> Layout:
    position = {world: index for index, world in enumerate(ranks)}
    islands = placement.islands_of(ranks)
    return Layout(rank, tuple(tuple(position[w] for w in members) for members in islands.values()))


def _reduction(opts: Any) -> Reduction:
    return reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
