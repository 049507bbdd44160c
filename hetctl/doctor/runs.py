"""A run's folder read afterwards: what failed first, which rank waited for whom, and what probably caused it. Pure
but for reading files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.values import encode
from hetctl.launcher.run_folder.failure import TOLD_BY_OTHERS
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.waiting import Waiting, read_flights, read_object, root_of, who_waited
from hetctl.probe.raw import printable

_TAIL_BYTES = 64 * 1024
_CAUSES: tuple[tuple[str, str, str], ...] = (  # what logs say, what it means, what to type
    (
        r"the kernel killed it: .*\(SIGKILL\)",
        "the kernel killed it: its host, or its memory limit, ran out of memory",
        "sudo dmesg -T | grep -i 'out of memory'",
    ),
    (
        r"SIGKILL \(the kernel reports no lack of memory",
        "somebody, or a job scheduler, sent it SIGKILL: the kernel reports no lack of memory",
        "last -n 20  # who was there; a scheduler's own log says what it ended, and why",
    ),
    (r"out of memory|OutOfMemoryError", "a device ran out of memory", "hetctl plan --explain  # smaller micro-batches"),
    (r"SIGKILL", "the kernel ended it, probably for want of memory", "sudo dmesg -T | grep -i 'out of memory'"),
    (r"No space left on device|Disk quota", "a disk is full", "df -hi"),
    (r"Read-only file system|Permission denied", "something could not be written", "hetctl doctor --only host.disk"),
    (
        r"ibv_reg_mr|Cannot allocate memory.*verbs|memlock",
        "too little memory may be pinned",
        "hetctl doctor --only lim",
    ),
    (r"Address already in use", "a port was taken", "ss -ltnp"),
    (r"Connection refused|No route to host", "a host was not reached", "hetctl doctor --level pairs --only ssh.peer"),
    (
        r"ncclUnhandledCudaError|unhandled cuda|Xid|GPU is lost|HSA_STATUS_ERROR",
        "a GPU failed",
        "hetctl doctor --only gpu",
    ),
    (r"ModuleNotFoundError|ImportError", "software is missing or does not fit", "hetctl doctor --only sw"),
    (r"message truncated", "two vendors' libraries met in one communicator", "hetctl plan --explain"),
    (r"\bnan\b|not finite", "a value was not finite", "hetctl doctor --level perf --only perf.numerics"),
)


@dataclass(frozen=True)
class Diagnosis:
    """What a run's folder tells. `culprit` is the rank that the others waited for or that failed first."""

    run: str
    status: str
    culprit: int | None
    cause: str
    advice: str
    waiting: tuple[Waiting, ...] = ()
    evidence: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    failure: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.status not in ("done", "interrupted")

    @property
    def document(self) -> dict[str, Any]:
        return {**encode(self), "exit_code": int(self.failed)}


def find_run(name: str) -> RunFolder:
    """A run by its folder, or by its name below runs/. Raises ConfigError."""
    for path in (Path(name), Path("runs") / name):
        if path.is_dir():
            return RunFolder(path.resolve())
    raise ConfigError(
        f"there is no run '{name}'", hint="name a folder, or a run below runs/ (runs/latest is the newest)"
    )


def diagnose(folder: RunFolder) -> Diagnosis:
    """Everything the folder tells of how the run ended."""
    unsure: list[str] = []
    summary, failure = read_object(folder.summary, unsure), read_object(folder.failure, unsure)
    flights = read_flights(folder, unsure)
    logs = {rank: text for rank, text in _logs(folder).items() if text}
    waiting = who_waited(flights)
    rank = failure.get("rank")
    root = root_of(waiting)
    culprit = rank if isinstance(rank, int) and not _only_told(failure) else root if root is not None else rank
    status = str(summary.get("status") or ("failed" if failure or waiting else "unknown"))
    evidence = _evidence(failure, logs, culprit)
    cause, advice = likely_cause([str(failure.get("reason", "")), *evidence])
    if not cause:
        cause = _said(failure, waiting, culprit)
    if not flights and status == "failed":
        unsure.append("no flight recorder was written: who waited for whom is not known")
    return Diagnosis(
        folder.name,
        status,
        culprit if isinstance(culprit, int) else None,
        cause if status != "done" else "it ended well",
        advice,
        waiting,
        tuple(printable(line, limit=300) for line in evidence),
        tuple(map(printable, unsure)),
        failure,
    )


def likely_cause(texts: Iterable[str]) -> tuple[str, str]:
    """(what it probably was, what to type) of the first text that one of the known patterns fits; '' for neither."""
    for text in texts:
        for pattern, cause, advice in _CAUSES:
            if re.search(pattern, text, re.IGNORECASE if pattern.islower() else 0):
                return cause, advice
    return "", ""


def _only_told(failure: Mapping[str, Any]) -> bool:
    """Whether what failed first only says that somebody else went away."""
    return TOLD_BY_OTHERS.search(str(failure.get("reason", ""))) is not None


def _said(failure: Mapping[str, Any], waiting: Sequence[Waiting], culprit: object) -> str:
    if failure and not _only_told(failure):
        return str(failure.get("reason", ""))
    if waiting and culprit is not None:
        return f"rank {culprit} did not come to what the others had begun"
    return str(failure.get("reason") or "nothing in the folder tells")


def _evidence(failure: Mapping[str, Any], logs: Mapping[int, str], culprit: object) -> list[str]:
    """The lines of the culprit's log, then of the others', that speak of trouble."""
    lines = []
    order = sorted(logs, key=lambda rank: (rank != culprit, rank))
    trouble = re.compile("|".join(pattern for pattern, _, _ in _CAUSES) + r"|Error\b|Traceback")
    for rank in order[:64]:
        hits = [line for line in logs[rank].splitlines() if trouble.search(line)]
        lines += [f"rank {rank}: {line.strip()}" for line in hits[-2:]]
    last = (str(failure.get("traceback") or "").strip().splitlines() or [""])[-1]
    return [line for line in (last, *lines[:12]) if line]


def _logs(folder: RunFolder) -> dict[int, str]:
    """Rank -> the end of its log."""
    found = {}
    for rank, path in folder.logs.items():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            found[rank] = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return found
