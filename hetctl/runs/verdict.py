"""A run that did not end well, as the one error that says so: what, where, what was saved, and how to go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import HetctlError, Interrupted, WorkFailed
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.render.run import failure_lines, failure_sentence, parity_sentence
from hetctl.runs.resume import RESUME, resume_command

UNEQUAL = "do not trust what it trained: `hetctl validate` says what computes or moves wrongly here"


def raise_unless_done(summary: dict[str, Any]) -> None:
    """The exit code of a run: failures 1, interruptions 128 and the signal. Raises the matching HetctlError."""
    if (parity := summary.get("parity")) and not parity["equal"]:
        raise WorkFailed(f"trained, but {parity_sentence(parity)}", hint=UNEQUAL, documented=True)
    if summary["status"] not in ("interrupted", "failed"):
        return
    failure = RunFolder(Path(summary["run_dir"])).read_failure()
    error = _interrupted(summary) if summary["status"] == "interrupted" else _failed(summary, failure)
    where = (*failure_lines(failure), f"more: {summary['run_dir']}/failure.json") if failure else ()
    error.details = (*where, *saved_lines(summary))
    raise error


def with_way_on(error: HetctlError, folder: RunFolder) -> HetctlError:
    """The error of a run that ended without a summary, with the command that begins it again, where there is one."""
    if error.exit_code in (WorkFailed.exit_code, 4) and folder.prepared.is_file():
        error.details = (*error.details, f"{RESUME} {resume_command(folder)}")
    return error


def saved_lines(summary: dict[str, Any]) -> tuple[str, ...]:
    """What was saved of a run that could go on, and the command; nothing for what cannot."""
    if (command := summary.get("resume")) is None:
        return ()
    step = summary.get("checkpoint_step")
    saved = "no checkpoint was saved: it begins anew" if step is None else f"newest checkpoint: step {step}"
    return saved, f"{RESUME} {command}"


def _interrupted(summary: dict[str, Any]) -> Interrupted:
    failure, hint = summary.get("failure"), ""
    if failure:  # nobody shall think that its work was saved
        hint = "what it did since its newest checkpoint may be lost"
    what = f"the run was interrupted, and failed before it had ended: {failure}" if failure else ""
    error = Interrupted(what or "the run was interrupted", hint=hint, documented=True)
    error.exit_code = 128 + (summary.get("signal") or signal.SIGINT)
    return error


def _failed(summary: dict[str, Any], failure: dict[str, Any]) -> WorkFailed:
    sentence = failure_sentence(failure) if failure else f"the run failed: {summary['failure']}"
    return WorkFailed(sentence, hint=summary.get("failure_hint") or "", documented=True)
