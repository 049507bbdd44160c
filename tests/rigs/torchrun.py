"""torchrun on each host of a rig, as somebody starts it by hand on unlike machines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.rigs import netns
from tests.rigs.cluster import environment


class Torchrun:
    """Jobs of one torchrun a host; each has a port of its own."""

    def __init__(self, rig: netns.Rig, folder: Path) -> None:
        self.rig, self.folder, self._port = rig, folder, 29600

    def start(
        self, *words: str, processes: Sequence[int] = (1, 1), out: int | IO[bytes] = subprocess.PIPE, **more: str
    ) -> list[subprocess.Popen[str]]:
        self._port += 1
        at = ["--nnodes", str(len(self.rig.hosts)), "--master-addr", self.rig.hosts[0].address]
        at += ["--master-port", str(self._port)]
        started = []
        for number, host in enumerate(self.rig.hosts):
            run = [sys.executable, "-m", "torch.distributed.run", *at, "--node-rank", str(number)]
            run += ["--nproc-per-node", str(processes[number]), *words]
            inside = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c"]
            line = [*inside, 'hostname "$1"; shift; exec "$@"', "sh", host.name, *run]
            env = environment(self.rig, OMP_NUM_THREADS="1", XDG_STATE_HOME=str(self.folder / host.name), **more)
            started.append(subprocess.Popen(line, cwd=self.folder, env=env, text=True, stdout=out, stderr=out))
        return started

    def ours(self) -> list[str]:
        found = []
        for pid in (pid for host in self.rig.hosts for pid in host.pids()):
            with contextlib.suppress(OSError):  # it has ended since
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return [words for words in found if "hetctl" in words]
