"""A run's newest checkpoint brought here from hosts that share no folder: each holds what its own ranks wrote."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.units import MiB, listed
from hetctl.console import Sink
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agents import ask, of_run, stream
from hetctl.launcher.supervisor.launch import shell_opener, target_of
from hetctl.runs.resume import kept, newest_on
from hetctl.trainer.checkpoint.listing import MANIFEST
from hetctl.trainer.checkpoint.per_host import merged

LOOKING_S = 60.0  # for each host
FETCHING_S = 86400.0


def fetch(run: RunFolder, to: RunFolder, sink: Sink) -> Path | None:
    """The checkpoint in `to`, whole, beside the job it is of; None where no host has one. Raises HetctlError."""
    launch = kept(run).launch
    if launch.here:
        return None
    open_shell, close = shell_opener(launch.way)
    try:
        targets = [(target_of(host, open_shell), of_run(run, host.name)) for host in launch.hosts]
        held = [ask(t, {"do": "enter", **of}, "host", Deadline(LOOKING_S))["checkpoints"] for t, of in targets]
        name = newest_on(held)
        if name is None:
            return None
        manifests, path = [], to.checkpoints / name
        holders = [target for target, names in zip(targets, held, strict=True) if names]
        sink.say(f"fetching {name} from {listed([target.name for target, _ in holders])}")
        for target, of in holders:
            request = {"do": "lend", "checkpoint": name, **of}
            _unpack(stream(target, request, Deadline(FETCHING_S)), to.path)
            manifests.append(json.loads((path / MANIFEST).read_text()))
    finally:
        close()
    write_json(path / MANIFEST, merged(manifests))
    return path


def _unpack(pieces: Iterator[bytes], to: Path) -> None:
    with tarfile.open(fileobj=cast(Any, _Pieces(pieces)), mode="r|", bufsize=MiB) as packed:
        packed.extractall(to, filter="data")
    for _ in pieces:  # to its end, which says whether it was whole
        pass


class _Pieces:
    """What tarfile reads from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, None)) is not None:
            self._rest += piece
        found, self._rest = self._rest[:size], self._rest[size:]
        return found
