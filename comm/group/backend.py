"""The word `het` for torch.distributed: groups inside one island are native, groups across islands HetGroups."""

from __future__ import annotations

from typing import Any

import torch

from hetctl.comm.contract.natives import HOST, native_of
from hetctl.comm.contract.placement import Placement
from hetctl.comm.group.builds import check_builds
from hetctl.comm.group.group import HetGroup
from hetctl.comm.group.native import Membership, make_native
from hetctl.comm.operation.recorder import METER
from hetctl.comm.operation.work import PrefixStore, ProcessGroup


def bridge_bytes() -> int:
    """Bytes of tensors that this rank sent across islands since it started."""
    return METER.sent


def create_over(options: Any, placement: Placement) -> Any:
    """The process group for `options.global_ranks_in_group`: native inside one island, else a HetGroup.

    Raises ConfigError in the job's first group, that of all ranks, where these cannot work together.
    """
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if len(ranks) == len(placement.island_of_rank):
        check_builds(options.store, ranks[options.group_rank], placement)
    if len(placement.islands_of(ranks)) == 1:
        return _native_group(options, ranks, placement)
    return HetGroup(options, ranks, placement)


def _native_group(options: Any, ranks: tuple[int, ...], placement: Placement) -> Any:
    backend = placement.island_of_rank[ranks[0]].torch_backend
    rank, size, timeout = options.group_rank, options.group_size, options.timeout

    def native(name: str) -> Any:
        store = PrefixStore(f"{name}/", options.store)
        made = make_native(name, Membership(store, rank, size, timeout, sockets=placement.spans_islands(ranks)))
        made.options.global_ranks_in_group = list(ranks)
        made.options.group_name = options.group_id
        made._set_sequence_number_for_group()
        return made

    device_type, host = native_of(torch_backend=backend).device_type, native_of(device_type=HOST)
    if device_type == HOST:
        return native(backend)
    # host tensors (object collectives, checkpoints) need gloo beside the device's own library
    group = ProcessGroup(options.store, rank, size)
    group._set_default_backend(_type_of(backend))
    group._register_backend(torch.device(device_type), _type_of(backend), native(backend))
    group._register_backend(torch.device(HOST), _type_of(host.torch_backend), native(host.torch_backend))
    return group


def _type_of(backend: str) -> Any:
    """Torch's word for a kind of back end; libraries that it has not got are custom ones."""
    return getattr(ProcessGroup.BackendType, backend.upper(), ProcessGroup.BackendType.CUSTOM)
