"""For programs of torchcomms: `torchcomms.new_comm("het", device)` in place of "nccl" or "gloo".

torchcomms finds this module by the entry point `torchcomms.backends`; programs that run from a tree import it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchcomms

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.started import as_torchrun_says
from hetctl.comm.group.builds import check_builds
from hetctl.comm.group.group import HetGroup
from hetctl.comm.group.meeting import placement_for
from hetctl.comm.operation.work import PrefixStore, Reduce, Store

Tensors = list[torch.Tensor]

# hints by which a part is told what is its own: its ranks among those of the job, and a name that no other has
_MEMBERS, _UNIQUE = "hetctl_ranks", "hetctl_name"
_numbers = itertools.count(1)  # of communicators, which all ranks make in one order: names may be used again


class HetBackend(torchcomms.TorchCommBackend):  # type: ignore[misc]
    """A communicator across islands, by torchcomms' names; each operation is a HetGroup's. Collectives have ended when
    a call returns, asynchronous ones as well.

    Ranks and their number are torchrun's variables, or those of MPI and Slurm; the store is the communicator's, by
    default one at MASTER_ADDR. Options of one operation (timeout, hints, tags) do not reach back ends in Python.
    """

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Meet the other ranks. Raises ConfigError where they cannot work together, or the store's errors."""
        self._device, self._name = device, name
        rank, size = _place()
        part = options.hints.get(_MEMBERS)
        if part:
            self._ranks, unique, store = tuple(int(r) for r in part.split()), options.hints[_UNIQUE], options.store
        else:
            self._ranks, unique = tuple(range(size)), f"{name}/{next(_numbers)}"
            store = PrefixStore(f"torchcomms/{unique}/", options.store or _store_of_job(rank, size))
        self._told = SimpleNamespace(
            store=store,
            group_rank=self._ranks.index(rank),
            group_size=len(self._ranks),
            timeout=options.timeout,
            group_id=unique,
            global_ranks_in_group=self._ranks if part else (),
        )
        self._parts = itertools.count(1)
        placement = placement_for(self._told)
        if not part:
            check_builds(store, rank, placement)
        # also inside one island, where gloo lacks averages, unequal blocks and lists
        self._group = HetGroup(self._told, self._ranks, placement)

    def finalize(self) -> None:
        """Finish what is queued, then end threads and connections."""
        self._group.shutdown()

    def get_rank(self) -> int:
        return self._group.rank()

    def get_size(self) -> int:
        return self._group.size()

    def get_backend_name(self) -> str:
        return "het"

    def get_comm_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations from now on."""
        self._group.set_timeout(timeout)

    def split(self, ranks: list[int], name: str, options: Any) -> HetBackend | None:
        """The communicator of a part of the ranks, in their order; None for no ranks, which those outside name.

        Raises RuntimeError, as torchcomms' own do, for ranks that are not here, or twice, or lack this one.
        """
        number = next(self._parts)
        if not ranks:
            return None
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.get_size())):
            raise RuntimeError(f"ranks {ranks} are not each one of the {self.get_size()} of '{self._name}'")
        if self.get_rank() not in ranks:
            raise RuntimeError(f"rank {self.get_rank()} is not among the ranks {ranks}: it names none of them")
        unique = f"{self._told.group_id}/{number}.{min(ranks)} {name}"
        members = " ".join(str(self._ranks[r]) for r in ranks)
        # only what torchcomms itself makes knows its device and options
        made = torchcomms.new_comm(
            "het",
            self._device,
            name,
            timeout=options.timeout,
            store=PrefixStore(f"{unique}/", self._told.store),
            hints=dict(options.hints) | {_MEMBERS: members, _UNIQUE: unique},
        )
        part: HetBackend = made.get_backend_impl()
        return part

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool) -> Any:
        return _begun(self._group.send([tensor], dst), async_op)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool) -> Any:
        return _begun(self._group.recv([tensor], src), async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> None:
        _ended(self._group.broadcast([tensor], _options(root=root)))

    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> None:
        _ended(self._group.allreduce([tensor], _options(op)))

    def reduce(self, tensor: torch.Tensor, root: int, op: Any, async_op: bool) -> None:
        _ended(self._group.reduce([tensor], _options(op, root)))

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor, async_op: bool) -> None:
        _ended(self._group.allgather([outputs], [tensor], _options()))

    all_gather_v = all_gather

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> None:
        _ended(self._group.all_gather_single(output, tensor, _options()))

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: Any, async_op: bool) -> None:
        _ended(self._group.reduce_scatter([output], [inputs], _options(op)))

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: Any, async_op: bool) -> None:
        _ended(self._group.reduce_scatter_single(output, tensor, _options(op)))

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> None:
        self.all_to_all_v_single(output, tensor, [], [], async_op)

    def all_to_all_v_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_rows: list[int], rows: list[int], async_op: bool
    ) -> None:
        _ended(self._group.all_to_all_single(output, tensor, out_rows, rows, _options()))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, async_op: bool) -> None:
        _ended(self._group.alltoall(outputs, inputs, _options()))

    def barrier(self, async_op: bool) -> None:
        _ended(self._group.barrier(_options()))

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int, async_op: bool) -> None:
        given = [inputs] if self.get_rank() == root else []
        _ended(self._group.scatter([output], given, _options(root=root)))

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, async_op: bool) -> None:
        wanted = [outputs] if self.get_rank() == root else []
        _ended(self._group.gather(wanted, [tensor], _options(root=root)))


class _Handle:
    """What torchcomms holds of a message that is under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


# torchcomms lets go of handles without the interpreter's lock, so the last to let go of one must be somebody else
_handles: deque[_Handle] = deque(maxlen=1024)


def _begun(work: Any, async_op: bool) -> _Handle | None:
    """What torchcomms is given of a message: a handle, or nothing for one that is over."""
    if not async_op:
        _ended(work)
        return None
    _handles.append(_Handle(work))
    return _handles[-1]


def _ended(work: Any) -> None:
    """Wait for a collective (a device: have its stream wait), asked for as asynchronous or not.

    What torchcomms makes of a handle never says that it has ended, and DDP waits for that.
    """
    work.wait()


def _options(op: Any = None, root: int = 0) -> SimpleNamespace:
    """c10d's options of an operation. Raises ConfigError for a sum whose factor cannot be found out."""
    if op is not None and op.type.name == "PREMUL_SUM":
        made = dist._make_nccl_premul_sum(_factor(op))
    else:
        made = dist.ReduceOp(Reduce.SUM if op is None else getattr(Reduce, op.type.name))
    return SimpleNamespace(reduceOp=made, rootRank=root, asyncOp=False)


def _factor(op: Any) -> float:
    """Of a sum of multiplied tensors. Back ends in Python are not shown it: torchcomms' own gloo multiplies a one."""
    one = torch.ones(1, dtype=torch.float64)
    _own_gloo().all_reduce(one, op, False)
    return one.item()


@functools.cache
def _own_gloo() -> Any:
    """A communicator of this process alone, which only listens to itself."""
    told = {"TORCHCOMM_RANK": "0", "TORCHCOMM_SIZE": "1", "TORCHCOMM_GLOO_HOSTNAME": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        made = torchcomms.new_comm(
            "gloo",
            torch.device("cpu"),
            "hetctl_factors",
            store=dist.HashStore(),
            hints={"persistent_store": "true"},
        )
    except (LookupError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"PREMUL_SUM needs torchcomms' own gloo, which is not here: {error}",
            hint="multiply the tensor, then SUM",
        ) from None
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
    atexit.register(made.finalize)
    return made


def _place() -> tuple[int, int]:
    """This rank and how many there are, as torchcomms or the launcher has it. Raises ConfigError where nobody says."""
    os.environ.update(as_torchrun_says(os.environ))
    for rank, size in (("TORCHCOMM_RANK", "TORCHCOMM_SIZE"), ("RANK", "WORLD_SIZE")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise ConfigError("RANK and WORLD_SIZE are not set", hint="start it by `hetctl run`, torchrun or mpirun")


@functools.cache
def _store_of_job(rank: int, size: int) -> Store:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return next(dist.rendezvous("env://", rank, size))[0]


torchcomms.register_backend("het", HetBackend)
