"""What a claim is: a sentence of our documentation, what it needs, how it is judged, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract.errors import HetctlError, WorkFailed
from hetctl.comm.contract.files import write_json
from hetctl.console import Sink
from hetctl.validate.ground import ClaimHosts

Verdict = Literal["holds", "does not hold", "not applicable", "could not tell"]
Measure = Callable[[ClaimHosts, Path, Sink], Any]  # into a folder for evidence; may raise
Judge = Callable[[Any, ClaimHosts], "Judgement"]  # pure


@dataclass(frozen=True)
class Judgement:
    """What judging a claim came to: the verdict, why in a sentence, and the figures behind it."""

    verdict: Verdict
    says: str
    figures: Mapping[str, Any] = field(default_factory=dict)


holds = partial(Judgement, "holds")
does_not_hold = partial(Judgement, "does not hold")
not_applicable = partial(Judgement, "not applicable")
could_not_tell = partial(Judgement, "could not tell")


@dataclass(frozen=True)
class Claim:
    """One claim. `lacking` says why it does not apply here ('' where it does).

    `made` is the file that makes it and words that stand there. What `measure` found is kept as `document`
    ('' where it kept its own documents), and judged.
    """

    id: str
    sentence: str
    made: tuple[str, str]
    needs: str
    how: str
    lacking: Callable[[ClaimHosts], str]
    measure: Measure
    judge: Judge
    document: str = ""
    every_host: bool = False  # it speaks of every host: one that did not answer leaves it open

    @property
    def theme(self) -> str:
        return self.id.partition(".")[0]

    def check(self, ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
        """Measure and judge: work that failed speaks against the claim, all else that is raised against knowing."""
        try:
            found = self.measure(ground, folder, sink)
            if self.document:
                write_json(folder / self.document, found)
            return self.judge(found, ground)
        except WorkFailed as error:
            return does_not_hold(error.message, {"hint": error.hint})
        except HetctlError as error:
            return could_not_tell(error.message, {"hint": error.hint})
        except Exception as error:  # one claim that breaks is that claim's outcome
            return could_not_tell(f"the check itself broke: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Result:
    """A claim as it was judged; `evidence` are file names below the evidence folder."""

    claim: Claim
    outcome: Judgement
    seconds: float = 0.0
    evidence: tuple[str, ...] = ()


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
