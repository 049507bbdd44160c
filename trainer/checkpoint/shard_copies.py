"""Copies of checkpoint shards on other hosts, where hosts share no folder: a lost host then takes none with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetctl.trainer.checkpoint.copy_targets import targets_of
from hetctl.trainer.checkpoint.file_wait import make_file_group
from hetctl.trainer.checkpoint.per_host import receive_file, send_file, spread


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
        listed = torch.frombuffer(bytearray(json.dumps(list(names)).encode()), dtype=torch.uint8)
        for target in self._targets:
            dist.send(torch.tensor([listed.numel()]), target, group=self._group)
            dist.send(listed, target, group=self._group)
            for name in names:
                send_file(folder / name, target, group=self._group)

    def _receive(self, folder: Path, source: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        listed = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(listed, source, group=self._group)
        folder.mkdir(parents=True, exist_ok=True)
        for name in json.loads(listed.numpy().tobytes()):
            receive_file(folder / Path(name).name, source, group=self._group)


def make_copier(hosts: Sequence[str], store: str) -> Copier | None:
    """This rank's copier where shards are kept more than once; all ranks call it, `hosts` names each one's host."""
    if store in ("auto", "shared") or not spread():
        return None
    return Copier(targets_of(hosts, store), make_file_group())
