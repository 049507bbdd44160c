"""Files between hosts: waiting for each other's, and checkpoints where hosts share no folder.

Each host then keeps the shards its ranks wrote, copies them to other hosts where the recipe asks for that (a lost host
takes none with it), and lends them for loading.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_json, write_json
from hetctl.comm.contract.placement import current_placement
from hetctl.comm.contract.units import MiB
from hetctl.trainer.checkpoint.copy_targets import targets_of
from hetctl.trainer.checkpoint.listing import MANIFEST

CHUNK_BYTES = 64 * MiB
FILES_SECONDS = 3600.0  # of one operation; a rank that ends is noticed at once all the same, by its agent


def make_file_group() -> Any:
    """A group of all ranks, for nothing but files: they may take longer than a step's operation.

    All ranks call it.
    """
    return dist.new_group(timeout=timedelta(seconds=FILES_SECONDS))


def meet(group: Any = None) -> None:
    """Wait for all ranks of a group, by a host tensor: a device's library would make a communicator for its barrier."""
    dist.all_reduce(torch.zeros(1), group=group)


def spread() -> bool:
    """Whether every host keeps its own part of a checkpoint."""
    return os.environ.get(variables.SPREAD) == "1"


def leads() -> bool:
    """Whether this rank commits checkpoints: one rank of the run, or one on each host where they share no folder."""
    rank = dist.get_rank()
    hosts = current_placement().hosts if spread() else ()
    return hosts.index(hosts[rank]) == rank if hosts else rank == 0


def make_copier(hosts: Sequence[str], store: str) -> Copier | None:
    """This rank's copier where shards are kept more than once; all ranks call it, `hosts` names each one's host."""
    if store in ("auto", "shared") or not spread():
        return None
    return Copier(targets_of(hosts, store), make_file_group())


class Copier:
    """This rank's part in the copying: whom it sends what it wrote, and whose files it takes in."""

    def __init__(self, targets: Sequence[Sequence[int]], group: Any) -> None:
        rank = dist.get_rank()
        self._targets = targets[rank]
        self._sources = [r for r, to in enumerate(targets) if rank in to]
        self._group = group

    def exchange(self, folder: Path, names: Sequence[str]) -> None:
        """Send files of `folder` to every target, and take in what the sources send; ends when all of it is on disk.

        Every rank calls it, from a thread of its own. Each source has a thread: one slow sender holds up no other.
        """
        with ThreadPoolExecutor(1 + len(self._sources), thread_name_prefix="copies") as threads:
            under_way = [threads.submit(self._send, folder, names)]
            under_way += [threads.submit(self._receive, folder, source) for source in self._sources]
            for one in under_way:
                one.result()

    def _send(self, folder: Path, names: Sequence[str]) -> None:
        for target in self._targets:
            dist.send_object_list([list(names)], target, group=self._group)
            for name in names:
                send_file(folder / name, target, group=self._group)

    def _receive(self, folder: Path, source: int) -> None:
        listed: list[Any] = [None]
        dist.recv_object_list(listed, source, group=self._group)
        folder.mkdir(parents=True, exist_ok=True)
        for name in listed[0]:
            receive_file(folder / Path(name).name, source, group=self._group)


def gather(path: Path, names: Iterable[str], *, group: Any = None) -> Path:
    """A folder here that holds what this host's ranks need of a checkpoint (parameters `names`); all ranks call it.

    Files that only other hosts hold are sent by them. `group` is of all ranks, with time for that. Raises ConfigError
    when nobody has one.
    """
    if not spread():
        return path
    target = path.with_name(f"gathered-{path.name}")
    manifest = _everybodys(path, group)
    about: dict[str, Any] = {
        "host": os.environ.get(variables.HOST, str(dist.get_rank())),
        "leads": leads(),
        "has": [f for f in manifest["files"] if (path / f).is_file()],
        "needs": _needed(manifest, set(names)),
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, about, group=group)
    if leads():
        target.mkdir(parents=True, exist_ok=True)
        for name in about["has"]:
            if not (target / name).exists():
                os.link(path / name, target / name)
        write_json(target / MANIFEST, manifest)
    for name in sorted(manifest["files"]):
        _lend(name, path, target, everybody, group)
    meet(group)
    return target


def release(path: Path, *, group: Any = None) -> None:
    """Remove what `gather` made, once all ranks have read it; all ranks call it."""
    meet(group)
    if spread() and leads() and path.name.startswith("gathered-"):
        shutil.rmtree(path, ignore_errors=True)


def _everybodys(path: Path, group: Any) -> dict[str, Any]:
    """What all hosts' manifests say together."""
    try:
        mine = read_json(path / MANIFEST)
    except (OSError, ValueError):
        mine = None
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine, group=group)
    found = [m for m in everybody if m is not None]
    if not found:
        raise ConfigError(f"no host has a checkpoint at {path}")
    return merged(found)


def merged(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the manifests of several hosts say of one checkpoint together."""
    whole = dict(manifests[0])
    for key, value in whole.items():
        if isinstance(value, dict):
            whole[key] = {k: v for m in manifests for k, v in m[key].items()}
    return whole


def _needed(manifest: dict[str, Any], names: set[str]) -> list[str]:
    """The files with parts of these parameters; a tensor's key begins with its parameter's name."""
    return [f for f, about in manifest["files"].items() if any(t.partition(":")[0] in names for t in about["tensors"])]


def _lend(name: str, path: Path, target: Path, everybody: list[Any], group: Any) -> None:
    """Send one file from the first rank that has it to the leader of each host that needs and lacks it."""
    rank = dist.get_rank()
    holders = [r for r, about in enumerate(everybody) if name in about["has"]]
    here = {about["host"] for about in everybody if name in about["has"]}
    hosts = {about["host"] for about in everybody if name in about["needs"]} - here
    if not hosts:
        return
    if not holders:
        raise ConfigError(f"{path.name} is incomplete: no host of this run has {name}", hint="its host is gone")
    for receiver in (r for r, about in enumerate(everybody) if about["leads"] and about["host"] in hosts):
        if rank == holders[0]:
            send_file(path / name, receiver, group=group)
        elif rank == receiver:
            receive_file(target / name, holders[0], group=group)


def send_file(file: Path, to: int, *, group: Any = None) -> None:
    """Send a file's bytes to a rank that calls `receive_file`."""
    size = file.stat().st_size
    dist.send(torch.tensor([size]), to, group=group)
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), to, group=group)


def receive_file(file: Path, sender: int, *, group: Any = None) -> None:
    """Write what a rank sends by `send_file`; it is on disk when this returns."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, sender, group=group)
    left = int(size)
    with file.open("wb") as stream:
        while left:
            chunk = torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8)
            dist.recv(chunk, sender, group=group)
            stream.write(chunk.numpy().tobytes())
            left -= chunk.numel()
        os.fsync(stream.fileno())
