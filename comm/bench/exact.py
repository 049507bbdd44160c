"""Whether groups carry and add exactly: whole numbers through sums and messages, before anything is believed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.bridge.engines.probe import ability
from hetctl.comm.bridge.engines.shared import ENGINES, wires_here
from hetctl.comm.contract.natives import native_of
from hetctl.comm.contract.placement import Placement
from hetctl.comm.operation.device import has_cuda_runtime, synchronize

COUNTS = (1, 1000, 65_537, 3_000_001)  # elements: below a chunk, at none of its borders, over several chunks
_DTYPES = (torch.float32, torch.float64)
_LIBRARY = re.compile(r"/(lib[nr]ccl[^/\s]*\.so[^/\s]*)")


@dataclass(frozen=True)
class Ends:
    """A group, its first and its last rank (of two islands) which exchange messages, and this rank's device."""

    group: Any
    rank: int
    world: int
    device: torch.device

    @property
    def peer(self) -> int | None:
        """The other end, None for a rank that only takes part in collectives."""
        last = self.world - 1
        return {0: last, last: 0}.get(self.rank)

    def settle(self) -> None:
        """Wait for this device and for everybody."""
        synchronize(self.device)
        dist.barrier(self.group)


def proved(ends: Ends) -> dict[str, Any]:
    """Sums over the group and messages between its ends: how many were tried, and in words which were wrong."""
    wrong = _wrong_sums(ends.group, ends.rank, ends.world, ends.device) + _wrong_messages(ends)
    everybody: list[Any] = [None] * ends.world
    dist.all_gather_object(everybody, wrong)
    sums, messages = len(COUNTS) * len(_DTYPES), 2 * len(COUNTS)
    return {"sums": sums, "messages": messages, "wrong": [words for of_rank in everybody for words in of_rank]}


def islands_proved(placement: Placement, device: torch.device) -> dict[str, Any] | None:
    """Each island's native group made and summed over: what its first rank says of it, None on the other ranks."""
    mine = None
    for island in placement.islands:
        group = dist.new_group(list(island.ranks), backend="het")  # inside one island: the native group itself
        if dist.get_rank() in island.ranks:
            place, size = island.ranks.index(dist.get_rank()), len(island.ranks)
            wrong = _wrong_sums(group, place, size, device)
            said: list[Any] = [None] * size
            dist.all_gather_object(said, (wrong, _library(device)), group=group)
            if place == 0:
                libraries = [library for _, library in said]
                words = [w for of_rank, _ in said for w in of_rank]
                mine = {"name": island.name, "ranks": size, "wrong": words, "libraries": _distinct(libraries)}
                mine["sums"] = len(COUNTS) * len(_DTYPES)
    return mine


def engines_tried(device: torch.device) -> dict[str, Any]:
    """Per engine why host and why device memory cannot be used by this rank; '' where a transfer to itself arrived."""
    wires, lacking = wires_here()
    if wires is None:
        return {"lacking": lacking, "engines": {}}
    number = (device.index or 0) if has_cuda_runtime(device) else None
    tried = {name: ability(name, wires, number) for name in ENGINES}
    engines = {name: {"host": t.host, "device": t.device, "lost": dict(t.lost)} for name, t in tried.items()}
    return {"lacking": "", "ports": list(wires.ports), "engines": engines}


def _wrong_sums(group: Any, rank: int, world: int, device: torch.device) -> list[str]:
    wrong = []
    for count in COUNTS:
        for dtype in _DTYPES:
            total = _pattern(count, rank, device).to(dtype)
            dist.all_reduce(total, group=group)
            wanted = sum((_pattern(count, other, device) for other in range(world)), torch.zeros((), device=device))
            if not torch.equal(total, wanted.to(dtype)):
                off = int((total != wanted.to(dtype)).sum())
                wrong.append(f"rank {rank}: {off} of {count} {dtype} sums are wrong")
    return wrong


def _wrong_messages(ends: Ends) -> list[str]:
    """Each end sends what the other one knows, first one way and then the other."""
    wrong: list[str] = []
    for turn in (0, 1):
        for count in COUNTS if ends.peer is not None else ():
            sent = _pattern(count, 5 + turn, ends.device)
            if (ends.rank == 0) == (turn == 0):
                dist.send(sent, ends.peer, group=ends.group)
                continue
            got = torch.full_like(sent, -1.0)
            dist.recv(got, ends.peer, group=ends.group)
            if not torch.equal(got, sent):
                wrong.append(f"rank {ends.rank}: {int((got != sent).sum())} of {count} received values are wrong")
    return wrong


def _pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """Small whole numbers that differ by place and by rank: fp32 adds those of 10,000 ranks exactly."""
    return torch.arange(count, device=device).mul_(7).add_(13 * rank).remainder_(251).float()


def _library(device: torch.device) -> dict[str, str]:
    """The native library that this process really runs, not what a package's metadata claims."""
    if not has_cuda_runtime(device):
        name = native_of(device_type=device.type).library
        return {"library": name, "version": f"of torch {torch.__version__}", "file": "", "device": device.type}
    from torch.cuda import nccl

    loaded = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    return {
        "library": "RCCL" if torch.version.hip else "NCCL",
        "version": ".".join(map(str, nccl.version())),
        "file": loaded[1] if loaded else "linked into torch",
        "device": torch.cuda.get_device_name(device),
    }


def _distinct(records: list[dict[str, str]]) -> list[dict[str, str]]:
    return list({tuple(r.items()): r for r in records}.values())
