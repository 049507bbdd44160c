"""Slurm, from outside an allocation: a run as a batch job, of one component or several, and what became of it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.cluster import Host
from hetctl.comm.contract.errors import ConfigError, HetctlError, WorkFailed
from hetctl.launcher.engines.site_commands import asked
from hetctl.launcher.hosts.host_names import fold

SAVE_BEFORE_S = 120  # this long before the time limit of a job the run saves and ends
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_GPUS = re.compile(r"gpu:(?:[A-Za-z0-9._-]+:)?\d+")
_LIVES = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING")


@dataclass(frozen=True)
class NodeFacts:
    """What Slurm has of a node: its partitions, those to ask for first, and its GPUs as --gres takes them."""

    partitions: tuple[str, ...] = ()
    gres: str = ""


@dataclass(frozen=True)
class Component:
    """Nodes that one part of a job asks for, and with which options."""

    hosts: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobState:
    """A job's state in Slurm's own word, why it waits, and whether it is over."""

    state: str
    reason: str = ""

    @property
    def over(self) -> bool:
        return self.state.split(" ")[0] not in _LIVES

    @property
    def words(self) -> str:
        """For people: `queued: Resources`."""
        if self.state in ("PENDING", "REQUEUED", "CONFIGURING"):
            return f"queued: {self.reason}" if self.reason not in ("", "None") else "queued"
        return self.state.lower()


def node_facts(hosts: Sequence[str]) -> Mapping[str, NodeFacts]:
    """What sinfo knows of these nodes; empty where no sinfo answers. Raises ConfigError naming strangers to it.

    Of a node's partitions the default one comes first, then those of the lowest tier: jobs of a higher one may end
    other people's, which nobody asked for. sinfo itself shows them in no order that lasts.
    """
    try:
        shown = _asked("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N|%P|%p|%G")
    except HetctlError:
        return {}
    partitions: dict[str, list[tuple[bool, int, str]]] = {}
    gpus: dict[str, str] = {}
    for line in shown.splitlines():
        name, partition, tier, gres = (*line.strip().split("|", 3), "", "", "")[:4]
        other = not partition.endswith("*")
        partitions.setdefault(name, []).append((other, int(tier) if tier.isdigit() else 0, partition.removesuffix("*")))
        held = _GPUS.search(gres)
        gpus[name] = held[0] if held else ""
    found = {name: NodeFacts(tuple(p for *_, p in sorted(of)), gpus[name]) for name, of in partitions.items()}
    if strangers := [h for h in hosts if h not in found]:
        hint = "cluster.yaml must call hosts by Slurm's names: `sinfo -N` shows them"
        raise ConfigError(f"Slurm knows no node {', '.join(strangers[:8])}", hint=hint)
    return found


def components_of(hosts: Sequence[Host], facts: Mapping[str, NodeFacts]) -> tuple[Component, ...]:
    """One component for all nodes that one partition has, under the same options; several where none has all.

    Of a node's partitions the one is taken that has the most of the run's nodes, then the one that comes first of them.
    """
    own = {host.name: host.access.slurm if host.access else () for host in hosts}
    given = {name for name, options in own.items() if any(o.startswith(("--partition", "-p")) for o in options)}
    free = [h.name for h in hosts if h.name not in given]
    partition = dict(_partitions(free, facts)) if "SBATCH_PARTITION" not in os.environ else {}
    members: dict[tuple[str, ...], list[str]] = {}
    for name, options in own.items():
        asked = [f"--partition={partition[name]}"] if name in partition else []
        gres = facts.get(name, NodeFacts()).gres
        told = "SBATCH_GRES" in os.environ or any(o.startswith(("--gres", "--gpus", "-G")) for o in options)
        asked += [f"--gres={gres}"] if gres and not told else []
        members.setdefault((*asked, *options), []).append(name)
    return tuple(Component(tuple(names), options) for options, names in members.items())


def _partitions(hosts: Sequence[str], facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """(node, its partition): as few partitions as taking the largest first finds; nothing where nothing is known."""
    left = [h for h in hosts if h in facts]
    while left:
        names = dict.fromkeys(name for host in left for name in facts[host].partitions)
        best = max(names, key=lambda name: _covered(name, left, facts))
        yield from ((host, best) for host in left if best in facts[host].partitions)
        left = [host for host in left if best not in facts[host].partitions]


def _covered(partition: str, hosts: Sequence[str], facts: Mapping[str, NodeFacts]) -> tuple[int, int]:
    """How many of these nodes a partition has, and of how many it is the first."""
    held = [facts[host].partitions for host in hosts if partition in facts[host].partitions]
    return len(held), sum(names[0] == partition for names in held)


def batch_script(name: str, components: Sequence[Component], *, output: Path, cwd: Path, argv: Sequence[str]) -> str:
    """The script of a job whose first node runs `argv`: whole nodes, queued again when preempted.

    Raises ConfigError for what is no name or option of Slurm.
    """
    head = [
        f"--job-name=hetctl-{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}",
        f"--output={shlex.quote(str(output))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR2@{SAVE_BEFORE_S}",
    ]
    parts = ["\n".join(f"#SBATCH {o}" for o in [*(head if not n else ()), *_asks(c)]) for n, c in enumerate(components)]
    asked = "\n#SBATCH hetjob\n".join(parts)
    return f"#!/bin/bash\n{asked}\ncd {shlex.quote(str(cwd))} && exec {shlex.join(argv)}\n"


def _asks(component: Component) -> Iterator[str]:
    bad = [h for h in component.hosts if not _NAME.fullmatch(h)]
    bad += [o for o in component.options if not o.startswith("-") or "\n" in o]
    if bad:
        raise ConfigError(f"{bad[0]!r} is not the name of a Slurm node, or an option of sbatch")
    # whole nodes: one task of one core is what a job has otherwise, and its ranks share that core
    yield f"--nodes={len(component.hosts)} --ntasks-per-node=1 --exclusive --mem=0"
    yield f"--nodelist={fold(component.hosts)}"
    yield from (shlex.quote(option) for option in component.options)


def submit_script(path: Path) -> tuple[int | None, str]:
    """The job's number, and what sbatch said. Raises ConfigError without sbatch, WorkFailed when it refuses."""
    try:
        said = _asked("sbatch", str(path))
    except HetctlError as error:
        error.hint = f"the script is {path}"
        raise
    number = re.search(r"\d+", said)
    return (int(number[0]) if number else None), said.strip()


def job_state(job: int) -> JobState:
    """Of a job that waits, runs, or is over (squeue forgets it; sacct may know). Raises HetctlError."""
    try:
        shown = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r").splitlines()
    except WorkFailed as error:
        if "Invalid job id" not in error.message:  # a controller that does not answer has forgotten nothing
            raise
        shown = []
    if shown:
        state, _, reason = shown[0].partition("|")
        return JobState(state, reason)
    try:
        lines = _asked("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State")
    except HetctlError:  # no accounting at this site
        lines = ""
    return JobState(lines.partition("\n")[0].strip() or "nothing of it any more")


def stop_job(job: int, *, now: bool) -> None:
    """Its supervisor finishes the step and saves; `now`: Slurm ends all of it. Raises HetctlError."""
    _asked("scancel", *([] if now else ["--signal=TERM", "--batch"]), str(job))


def requeue(job: int) -> None:
    """Have the job that we are in queued again. Raises HetctlError."""
    _asked("scontrol", "requeue", str(job))


def current_job() -> int | None:
    """The batch job that this process is the supervisor of; of a heterogeneous one the first component's."""
    number = os.environ.get("SLURM_JOB_ID", "")
    return int(number) if number.isdigit() and os.environ.get("SLURM_JOB_NAME", "").startswith("hetctl-") else None


def _asked(*argv: str) -> str:
    return asked(*argv, hint="go where Slurm's commands are")
