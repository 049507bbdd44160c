"""summary.json of a training run: what it came to, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from hetctl.comm.contract.events import TrainingEnded
from hetctl.comm.contract.values import encode
from hetctl.launcher.run_folder.records import Parity

# of what the ranks tell at the end: what has a key of its own, and what is only known where steps were made
_APART = ("shares", "island_shares", "timeline", "steps", "first_loss", "last_loss", "tokens")
_OF_STEPS = ("tokens_per_s", "bridge_bytes", "memory_bytes", "replica_spread")
_IF_KNOWN = (
    *("checkpoint_step", "resume", "parity", "best_step", "best_validation_loss", "stalled"),
    *("validation_accuracy", "validation_margin"),
)


@dataclass(frozen=True)
class RunSummary:
    """How a run ended and what it reached; steps, losses and tokens are the whole run's, not the last attempt's."""

    run: str
    status: str  # done, saved (asked to save and end), interrupted or failed
    model: str
    parameters: int | None
    steps: int
    steps_planned: int | None
    first_loss: float | None
    last_loss: float | None
    tokens: int
    islands: Sequence[Mapping[str, Any]]
    emulated: bool | None
    wall_s: float | None
    run_dir: str
    shares_cores: bool = False  # ranks are this machine's processes: efficiency and stragglers say nothing
    processes_left: int = 0
    links: Sequence[Mapping[str, Any]] = ()  # network ports that became worse, or well again
    restarts: int = 0
    missing_hosts: Mapping[str, str] = field(default_factory=dict)
    mfu: float | None = None
    efficiency: float | None = None
    efficiency_basis: str | None = None
    ended: TrainingEnded | None = None  # what the ranks told at their end
    bridges: Sequence[Mapping[str, Any]] = ()
    signal: int | None = None  # that interrupted it
    checkpoint_step: int | None = None  # of the newest whole checkpoint, where this attempt began from one or made one
    resume: str | None = None  # the command that goes on with it; None where nothing is left to do
    parity: Parity | None = None  # where it was asked for
    failure: str | None = None
    error_type: str | None = None
    failure_hint: str | None = None

    def document(self) -> dict[str, Any]:
        """As summary.json holds it: what was not told, or did not happen, has no key."""
        shares = dict(self.ended.shares) if self.ended else {}
        plain: dict[str, Any] = encode(self)
        for key in ("ended", "bridges", "signal", "failure", "error_type", "failure_hint"):
            del plain[key]
        plain |= _told(self.ended) if self.ended else {}
        plain |= {"bubble_share": shares.get("bubble"), "bridge_share": shares.get("bridge"), "shares": shares}
        plain = {key: value for key, value in plain.items() if value is not None or key not in _IF_KNOWN}
        plain |= {"bridges": encode(self.bridges)} if self.bridges else {}
        plain |= {"signal": self.signal} if self.status == "interrupted" else {}
        if self.failure is not None:
            plain |= {"failure": self.failure, "error_type": self.error_type, "failure_hint": self.failure_hint or ""}
        return plain


def _told(ended: TrainingEnded) -> dict[str, Any]:
    left_out = _APART if ended.tokens is not None else (*_APART, *_OF_STEPS)
    return {key: value for key, value in encode(ended).items() if key not in left_out}


# of a summary, by the page and the table of a report
NEEDED = tuple(f.name for f in fields(RunSummary) if f.default is MISSING and f.default_factory is MISSING)
