"""The one error family: raised deep, shown once by `hetctl.app` as a sentence, a hint and an exit code."""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

# characters of a message: it may quote what somebody wrote, and says why at its end
SAID_FIRST, SAID_LAST = 1200, 500
MOST_SAID = SAID_FIRST + SAID_LAST


class HetctlError(Exception):
    """A failure a person can act on: one sentence, a hint on what to do, and the documented exit code."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", documented: bool = False) -> None:
        message = message if len(message) <= MOST_SAID else f"{message[:SAID_FIRST]} … {message[-SAID_LAST:]}"
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.documented = documented  # `--json` has already printed the document that says so
        self.details: tuple[str, ...] = ()  # lines for people, under the hint: where, what was saved, how to go on
        self.hosts: dict[str, HetctlError] = {}  # where it stands for several hosts: what is wrong with each


HINT = "\nhint: "  # in the text of an error that one process tells another one


@contextlib.contextmanager
def with_hints() -> Iterator[None]:
    """Errors that leave here take their hints along in their text, for whoever reads only that."""
    try:
        yield
    except HetctlError as error:
        if error.hint:
            error.args = (error.message + HINT + error.hint,)
        raise


class WorkFailed(HetctlError):
    """The work itself failed (exit 1): a rank crashed, a check failed."""


class ConfigError(HetctlError):
    """What a person typed or wrote is wrong (exit 2)."""

    exit_code = 2


class Undetermined(HetctlError):
    """Something essential could not be determined (exit 3)."""

    exit_code = 3


class Unreachable(HetctlError):
    """One or more hosts could not be reached (exit 4)."""

    exit_code = 4


class Infeasible(HetctlError):
    """No plan satisfies the constraints (exit 5)."""

    exit_code = 5


class Interrupted(HetctlError):
    """A signal ended the work: exit 128 and its number (130 for INT, the default, 143 for TERM, 129 for HUP)."""

    exit_code = 130


class BridgeError(WorkFailed, RuntimeError):
    """An operation across islands failed; also a RuntimeError, as programs expect of torch.distributed."""


_HINTS = {
    errno.ENOSPC: "make room there, or choose another place",
    errno.EDQUOT: "make room there, or choose another place",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "check its permissions, or choose another place",
    errno.EPERM: "check its permissions, or choose another place",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of that path is a file: choose another place",
    errno.EEXIST: "a part of that path is a file: choose another place",
}


def of_system(error: OSError) -> WorkFailed:
    """What the system refused, for a person: which path, why, and what may help."""
    path, why = error.filename2 or error.filename, error.strerror or reason_of(error)
    hint = _HINTS.get(error.errno or 0, "check the path, the disk and the network")
    return WorkFailed(f"cannot read or write {path}: {why}" if path else f"the system refused: {why}", hint=hint)


def reason_of(error: BaseException) -> str:
    """The one line of a library's error that a person needs: without its source file, stack and advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0]
    if text.startswith("[") and "] " in text:
        text = text.split("] ", 1)[1]
    return text.split(". This is typically")[0][:200]


def nearest(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """A hint naming the known words closest to `word`, or all of them when none is close."""
    choices = sorted(known)
    close = difflib.get_close_matches(word[:100].lower(), choices, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
    return "known: " + ", ".join(choices)
