"""What a rule says: ok, or what is wrong, why, and what to type; and the worst of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

State = Literal["ok", "warn", "fail", "unknown"]
H = TypeVar("H")
WORST_FIRST: tuple[State, ...] = ("fail", "unknown", "warn", "ok")
_MOST_REASONS = 3


@dataclass(frozen=True)
class Verdict:
    """What a rule says. `about` names the host or pair where the rule was asked about the whole cluster."""

    state: State
    reason: str
    fix: str = ""  # instead of the check's own line
    about: str = ""
    values: Mapping[str, object] = field(default_factory=dict)  # what the check's line to paste is filled with


def ok(reason: str, *, about: str = "") -> Verdict:
    return Verdict("ok", reason, about=about)


def warn(reason: str, fix: str = "", *, about: str = "", **values: object) -> Verdict:
    return Verdict("warn", reason, fix, about, values)


def fail(reason: str, fix: str = "", *, about: str = "", **values: object) -> Verdict:
    return Verdict("fail", reason, fix, about, values)


def unknown(reason: str, fix: str = "", *, about: str = "", **values: object) -> Verdict:
    return Verdict("unknown", reason, fix, about, values)


def worst(verdicts: Iterable[Verdict], *, otherwise: str) -> Verdict:
    """The worst of several as one, the reasons of its state together; ok with `otherwise` when there is none."""
    every = list(verdicts)
    for state in WORST_FIRST:
        of_state = [v for v in every if v.state == state]
        if of_state and state != "ok":
            reasons = list(dict.fromkeys(v.reason for v in of_state))
            more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
            text = "; ".join(reasons[:_MOST_REASONS]) + more
            return Verdict(state, text, of_state[0].fix, values=of_state[0].values)
    return ok(every[0].reason if len(every) == 1 else otherwise)


def usual(values: Iterable[H]) -> H:
    """What most have; of equally many, the largest. There must be one."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))
