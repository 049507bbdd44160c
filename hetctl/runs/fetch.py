"""A run's newest checkpoint brought here from hosts that share no folder: each holds what its own ranks wrote."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hetctl.comm.contract.files import read_json, write_json
from hetctl.comm.contract.units import MiB, listed
from hetctl.console import Sink
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agents import ask, of_run, stream
from hetctl.launcher.supervisor.launch import target_of
from hetctl.runs.resume import kept, newest_on
from hetctl.trainer.checkpoint import listing
from hetctl.trainer.checkpoint.listing import MANIFEST
from hetctl.trainer.checkpoint.per_host import merged

LOOKING_S = 60.0  # for each host
FETCHING_S = 86400.0


def fetch(run: RunFolder, to: RunFolder, sink: Sink, *, step: str | None = None) -> Path | None:
    """The newest checkpoint (or that of `step`) in `to`, whole, beside the job it is of; None where no host has one.

    Raises HetctlError.
    """
    launch, wanted = kept(run).launch, _wanted(run, step)
    if launch.here:
        return None
    with Entrance(launch.way) as entrance:
        targets = [(target_of(host, entrance), of_run(run, host.name)) for host in launch.hosts]
        held = [ask(t, {"do": "enter", **of}, "host", Deadline(LOOKING_S))["checkpoints"] for t, of in targets]
        held = [[n for n in names if wanted in (None, n)] for names in held]
        name = newest_on(held)
        if name is None:
            return None
        manifests, path = [], to.checkpoints / name
        holders = [target for target, names in zip(targets, held, strict=True) if names]
        sink.say(f"fetching {name} from {listed([target.name for target, _ in holders])}")
        for target, of in holders:
            request = {"do": "lend", "checkpoint": name, **of}
            _unpack(stream(target, request, Deadline(FETCHING_S)), to.launch, path)
            manifests.append(read_json(path / MANIFEST))
    write_json(path / MANIFEST, merged(manifests))
    return path


def _wanted(run: RunFolder, step: str | None) -> str | None:
    """What the checkpoint of a step is called; the best one's is known here by the run's summary."""
    if step != listing.BEST:
        return None if step is None else listing.name_of(listing.step_in(step))
    if (best := run.read_summary().get("best_step")) is None:
        raise listing.no_best(run.path)
    return listing.name_of(best)


def _unpack(pieces: Iterator[bytes], launch: Path, checkpoint: Path) -> None:
    """The files of a tar stream, each into its folder, whatever else their names say."""
    with tarfile.open(fileobj=cast(Any, _Pieces(pieces)), mode="r|", bufsize=MiB) as packed:
        for member in packed:
            if (source := packed.extractfile(member)) is not None:
                folder = checkpoint if member.name.startswith("checkpoints/") else launch
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / Path(member.name).name).open("wb") as file:
                    shutil.copyfileobj(source, file)
    for _ in pieces:  # to its end, which says whether it was whole
        pass


class _Pieces:
    """What tarfile reads from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, bytearray()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, None)) is not None:
            self._rest += piece
        found = bytes(self._rest[:size])
        del self._rest[:size]
        return found
