"""Slurm as a third way to start the same agent: one srun step per host, its stdin and stdout joined with ours."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.host_names import expand
from hetctl.launcher.hosts.local import LocalSession, LocalShell


class SrunShell:
    """Commands on one node of the allocation this process is in."""

    def __init__(self, node: str) -> None:
        self.node = node

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> LocalSession:
        """Start `argv` there as a step of its own. Raises ShellError when there is no srun."""
        deadline.phase = f"starting a step on {self.node}"
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={self.node}", "--overlap", "--unbuffered"]
        step += ["--export=ALL", "--kill-on-bad-exit=0", "--"]
        return LocalShell().start([*step, *argv], deadline=deadline)

    def close(self) -> None:
        """Nothing to leave: the step ends with its session."""


def check_allocation(hosts: Sequence[str], nodelist: str) -> None:
    """Raise ConfigError naming hosts of the cluster that the allocation does not hold."""
    held = {spot.host for spot in expand(nodelist)}
    strangers = [h for h in hosts if h not in held]
    if strangers:
        raise ConfigError(
            f"{', '.join(strangers[:8])} of the cluster is not in this allocation ({nodelist})",
            hint="discover the allocation's own nodes, or use --launcher ssh",
        )
