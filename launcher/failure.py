"""From the events of a run to what failed: which rank first, why, and which ranks were only its victims. Pure."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a rank says when a peer or the network went away: a consequence, wherever there is a better cause.
TOLD_BY_OTHERS = re.compile(
    r"DistBackendError|DistNetworkError|BridgeError|gloo|NCCL|RCCL|Connection (closed|reset)|Broken pipe|timed? ?out",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Exit:
    """How one rank ended: its exit code (negative: by that signal), when (seconds since the epoch), and whether
    the agent had asked it to."""

    rank: int
    code: int
    at: float
    asked: bool = False


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, why, and the others that ended because of it."""

    rank: int
    host: str
    reason: str  # one sentence
    exit_code: int
    error_type: str | None
    traceback: str | None
    victims: tuple[int, ...]


@dataclass(frozen=True)
class RankError:
    """What a rank wrote into its error file: torch's format, message and time."""

    message: str
    traceback: str
    at: float


def find_failure(exits: Sequence[Exit], hosts: Sequence[str], errors: Mapping[int, RankError]) -> Failure | None:
    """The first failure among the exits, None if all ended well. `hosts` is per rank.

    Crashes and errors of a rank's own come before errors about peers and before ranks that were told to end;
    within each, the earlier one. An error's own time counts before the time its process was seen to end.
    """
    failed = [e for e in exits if e.code != 0]
    if not failed:
        return None
    first = min(failed, key=lambda e: (_is_consequence(e, errors), errors[e.rank].at if e.rank in errors else e.at))
    error = errors.get(first.rank)
    reason = error.message if error else _exit_reason(first.code)
    victims = tuple(sorted(e.rank for e in failed if e.rank != first.rank))
    kind = error.message.partition(":")[0] if error else None
    return Failure(first.rank, hosts[first.rank], reason, first.code, kind, error.traceback if error else None, victims)


def read_rank_error(path: Path) -> RankError | None:
    """A rank's error file in torch's format; None when there is none or it says nothing."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        extra = message.get("extraInfo", {})
        return RankError(str(message["message"]), str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_consequence(end: Exit, errors: Mapping[int, RankError]) -> bool:
    if end.rank in errors:
        return TOLD_BY_OTHERS.search(errors[end.rank].message) is not None
    return end.asked or -end.code == signal.SIGABRT  # a native library's watchdog aborts the ranks that waited


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory, if nobody sent it)" if -code == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"
