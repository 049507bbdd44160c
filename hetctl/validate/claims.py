"""What a claim is: a sentence of our documentation, what it needs, how it is judged, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract.errors import HetctlError, WorkFailed
from hetctl.console import Sink
from hetctl.validate.ground import ClaimHosts

Verdict = Literal["holds", "does not hold", "not applicable", "could not tell"]


@dataclass(frozen=True)
class Judgement:
    """What judging a claim came to: the verdict, why in a sentence, and the figures behind it."""

    verdict: Verdict
    says: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """One claim. `lacking` says why it does not apply here ('' where it does); `check` may raise.

    `made` is the file that makes it and words that stand there. `check` gets a folder for its evidence.
    """

    id: str
    sentence: str
    made: tuple[str, str]
    needs: str
    how: str
    lacking: Callable[[ClaimHosts], str]
    check: Callable[[ClaimHosts, Path, Sink], Judgement]
    every_host: bool = False  # it speaks of every host: one that did not answer leaves it open


@dataclass(frozen=True)
class Result:
    """A claim as it was judged; `evidence` are file names below the evidence folder."""

    claim: Claim
    outcome: Judgement
    seconds: float = 0.0
    evidence: tuple[str, ...] = ()


def holds(says: str, **figures: Any) -> Judgement:
    return Judgement("holds", says, figures)


def does_not_hold(says: str, **figures: Any) -> Judgement:
    return Judgement("does not hold", says, figures)


def not_applicable(says: str, **figures: Any) -> Judgement:
    return Judgement("not applicable", says, figures)


def could_not_tell(says: str, **figures: Any) -> Judgement:
    return Judgement("could not tell", says, figures)


def judged(check: Callable[[], Judgement]) -> Judgement:
    """The outcome of a check that may raise: work that failed speaks against its claim, all else against knowing."""
    try:
        return check()
    except WorkFailed as error:
        return does_not_hold(error.message, hint=error.hint)
    except HetctlError as error:
        return could_not_tell(error.message, hint=error.hint)
    except Exception as error:  # one claim that breaks is that claim's outcome
        return could_not_tell(f"the check itself broke: {type(error).__name__}: {error}")


def with_silent_hosts(claim: Claim, outcome: Judgement, ground: ClaimHosts) -> Judgement:
    """The outcome as it stands where hosts did not answer: what is known of the others says nothing of them."""
    if not ground.silent or not claim.every_host or outcome.verdict == "does not hold":
        return outcome
    silent = ", ".join(ground.silent)
    return replace(outcome, verdict="could not tell", says=f"{silent} did not answer; of the others: {outcome.says}")


def exit_code(results: list[Result]) -> int:
    """0 all that applies holds, 1 something does not hold, 3 something could not be determined."""
    verdicts = {r.outcome.verdict for r in results}
    return 1 if "does not hold" in verdicts else 3 if "could not tell" in verdicts else 0
