"""Slurm, inside an allocation: which nodes it holds, and a step on one of them as a way to run commands there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.host_names import expand, fold
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import Shell


def inside() -> bool:
    """Whether this process is of a Slurm job that can start steps."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def components(environment: Mapping[str, str] | None = None) -> dict[str, int]:
    """Each node of the allocation with the number of its component; none outside of one."""
    environment = os.environ if environment is None else environment
    lists = [environment.get("SLURM_JOB_NODELIST", "")]
    if (count := environment.get("SLURM_HET_SIZE", "")).isdecimal():
        lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{n}", "") for n in range(int(count))]
    return {spot.host: n for n, nodes in enumerate(lists) if nodes for spot in expand(nodes)}


class Slurm(Engine):
    """The allocation that this process is in."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._component = components(environment)

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Raise ConfigError naming hosts that the allocation does not hold."""
        strangers = [p.name for p in places if p.name not in self._component]
        if strangers:
            raise ConfigError(
                f"{', '.join(strangers[:8])} of the cluster is not in this allocation ({fold(list(self._component))})",
                hint="discover the allocation's own nodes, or use --launcher ssh",
            )

    def open(self, place: Place, deadline: Deadline) -> Shell:
        """Commands on a node: one srun step for each, its stdin and stdout joined with ours, free to use all cores."""
        deadline.phase = f"starting a step on {place.name}"
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={place.name}", "--overlap", "--cpu-bind=none"]
        if any(self._component.values()):
            step.append(f"--het-group={self._component.get(place.name, 0)}")
        return LocalShell((*step, "--unbuffered", "--export=ALL", "--kill-on-bad-exit=0", "--"))

    def close(self) -> None:
        """Nothing is held."""
