"""What ranks tell during a training run, to where people and files want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetctl.comm.contract.events import (
    Begin,
    EngineAccount,
    Note,
    Remembered,
    Sampled,
    Saved,
    Step,
    Told,
    TrainingEnded,
    Validated,
    present,
)
from hetctl.comm.contract.files import write_atomically, write_json
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.run import LiveRun, show_number
from hetctl.runs.metrics_writers import MetricsWriters
from hetctl.trainer.adapt.pace import Yardstick


class Follower:
    """Takes the events of one attempt: figures into the run's folder, to dashboards and the terminal; keeps its end."""

    def __init__(self, folder: RunFolder, live: LiveRun, config: Mapping[str, Any], against: Yardstick) -> None:
        self.folder, self.live, self.against = folder, live, against
        self.writers = MetricsWriters(folder, config, live.note)
        self.saved: int | None = None  # the step of the newest checkpoint that was committed
        self.ended: TrainingEnded | None = None
        self._recorded: set[int] | None = None  # steps that the file has, while late ones come: a run's are many
        self.engines: list[dict[str, Any]] = []  # what the engines of direct bridges say of each rank's transfers

    def take(self, told: Told) -> None:
        """One event."""
        match told.event:
            case Begin(step, _, text, versions):
                write_json(self.folder.versions, dict(versions))
                _check_text(self.folder, text, step, self.live.note)
                self.live.begin(step)
                self.writers.begin(step)
            case Step() as event:
                self._step(event, late=told.late or isinstance(event, Remembered))
            case Validated(step, loss, accuracy):
                self.writers.validated(step, loss)
                preferred = "" if accuracy is None else f", accuracy {accuracy:.1%}"
                self.live.note(f"validation loss after step {step}: {show_number(loss)}{preferred}")
            case Sampled(step, prompt, text):
                self.live.note(f"after step {step} {prompt!r} goes on {text!r}")
            case Saved(step):
                self.saved = step
            case Note(sentence, of_pace):
                if self.live.paces or not of_pace:
                    self.live.note(sentence)
            case TrainingEnded() as event:
                self.ended = event
            case EngineAccount() as event:
                self.engines.append({"rank": told.source, **present(event)})

    def _step(self, event: Step, *, late: bool) -> None:
        record = present(event) | self.against.figures(event.tokens_per_s)
        if not late:
            self._recorded = None
            self.folder.append_metrics(record)
            self.live.step(record)
            self.writers.step(record)
            return
        if self._recorded is None:
            self._recorded = {known["step"] for known in self.folder.read_metrics()}
        if event.step not in self._recorded:  # of an attempt whose launcher, or agent, was lost
            self._recorded.add(event.step)
            self.folder.append_metrics(record)


def _check_text(folder: RunFolder, text: str, step: int, say: Callable[[str], None]) -> None:
    """Keep the digest of the run's text; say where it changed before a checkpoint that the run goes on from."""
    if step and folder.text.is_file() and folder.text.read_text(encoding="utf-8") != text:
        say("note: the text is not what it was before the checkpoint: other samples follow on it")
    write_atomically(folder.text, text)
