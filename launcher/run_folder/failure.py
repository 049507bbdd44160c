"""From the events of a run to what failed: which rank first, why, and which ranks were only its victims. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetctl.comm.contract.errors import HINT

# What a rank says when a peer or the network went away: a consequence, wherever there is a better cause.
TOLD_BY_OTHERS = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|BridgeError|gloo|NCCL|RCCL|Connection (closed|reset)"
    r"|Broken pipe|timed? ?out",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"\w*(Error|Exception)\b")  # what a rank said of its own, not a library of its stack
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Exit:
    """How one rank ended: its exit code (negative: by that signal), when (seconds since the epoch), and whether
    the agent had asked it to. `reason` is what its agent or the supervisor knows better than the code says."""

    rank: int
    code: int
    at: float
    asked: bool = False
    reason: str | None = None
    oom: bool | None = None  # the kernel killed it for lack of memory; None: unknown
    said: str | None = None  # the last line of its log, where it wrote no error file
    seen: bool = True  # its process was; False: its host was lost, or cut off


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
    hint: str = ""  # what the rank said to do


@dataclass(frozen=True)
class RankError:
    """What a rank wrote into its error file: torch's format, message and time."""

    message: str
    traceback: str
    at: float
    hint: str = ""


def find_failure(exits: Sequence[Exit], hosts: Sequence[str], errors: Mapping[int, RankError]) -> Failure | None:
    """The first failure among the exits, None if all ended well. `hosts` is per rank.

    Crashes and errors of a rank's own come before errors about peers and before ranks that were told to end;
    within each, the earlier one. An error's own time counts before the time its process was seen to end.
    """
    failed = [e for e in exits if e.code != 0]
    if not failed:
        return None
    first = min(failed, key=lambda e: (_is_consequence(e, errors), errors[e.rank].at if e.rank in errors else e.at))
    error = None if first.reason else errors.get(first.rank)
    reason = reason_of(first, error)
    victims = tuple(sorted({e.rank for e in failed} - {first.rank}))
    kind = error.message.partition(":")[0] if error else None
    said, hint = (error.traceback, error.hint) if error else (None, "")
    return Failure(first.rank, hosts[first.rank], reason, first.code, kind, said, victims, hint)


def failed_all_the_same(exits: Sequence[Exit], errors: Mapping[int, RankError]) -> list[Exit]:
    """Of a run that was told to end, the ranks that could not do so for a reason of their own.

    Where none gives one and none was ended by force, those that failed: a full disk takes the first one's words.
    """

    def own(end: Exit) -> bool:
        if end.rank in errors:
            return is_own(errors[end.rank])
        return TOLD_BY_OTHERS.search(end.reason or end.said or "") is None

    failed = [e for e in exits if e.seen and e.code > 0]
    forced = any(e.code < 0 or not e.seen for e in exits)
    return [e for e in failed if own(e)] or ([] if forced else failed)


def reason_of(end: Exit, error: RankError | None) -> str:
    """Why a rank ended, in one sentence: what agents know, else what it said itself, else what its exit code means."""
    return end.reason or (error.message if error else _exit_reason(end))


def parse_rank_error(data: Any) -> RankError | None:
    """A rank's error file in torch's format, decoded; None when it says nothing."""
    try:
        message = data["message"]
        if isinstance(message, str):
            return RankError(message, "", 0.0)
        extra = message.get("extraInfo", {})
        text, _, hint = str(message["message"]).partition(HINT)
        return RankError(text, str(extra.get("py_callstack", "")), float(extra.get("timestamp", 0)), hint)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def is_own(error: RankError | None) -> bool:
    """Whether a rank's error is its own, not what others caused."""
    return error is not None and TOLD_BY_OTHERS.search(error.message) is None


def _is_consequence(end: Exit, errors: Mapping[int, RankError]) -> int:
    """0 for a cause, 1 for what others caused, 2 for who was told to end. What cuts hosts off is a cause."""
    if end.reason:
        return 2 if end.asked else 0
    if end.rank in errors:
        return int(not is_own(errors[end.rank]))
    if end.said and (end.code > 0 or _EXCEPTION.match(end.said)):
        return 2 if end.asked else int(TOLD_BY_OTHERS.search(end.said) is not None)
    if -end.code in _CRASHES:
        return 0  # nobody asks for these
    return 2 if end.asked else int(-end.code == signal.SIGABRT)  # a native library's watchdog aborts ranks that waited


def _exit_reason(end: Exit) -> str:
    said = f"; the last it said: {end.said}" if end.said else ""
    if end.code >= 0:
        return f"it ended with exit code {end.code}{said}"
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    if -end.code != signal.SIGKILL:
        return f"it was ended by {name}{said}"
    if end.oom:
        return "the kernel killed it: the host or its memory limit ran out of memory (SIGKILL)"
    doubt = (
        "the kernel reports no lack of memory, so somebody sent it" if end.oom is False else "out of memory, perhaps"
    )
    return f"it was ended by {name} ({doubt})"
