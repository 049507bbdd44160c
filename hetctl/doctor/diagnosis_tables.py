"""A run's diagnosis for people: how it ended, who waited for whom, the likely cause, what to type."""

from __future__ import annotations

from rich.markup import escape

from hetctl.console import Sink
from hetctl.doctor.runs import Diagnosis

_MOST = 16


def show_diagnosis(sink: Sink, found: Diagnosis) -> None:
    """The cause last, where the eye is."""
    sink.say(f"run {found.run}: {found.status}")
    for one in found.waiting[:_MOST]:
        whom = ", ".join(f"rank {r}" for r in one.targets[:8]) or "somebody it cannot name"
        sink.say(f"  rank {one.rank} waited for {whom} in {one.operation} (group {one.group or '?'})")
    if len(found.waiting) > _MOST:
        sink.say(f"  and {len(found.waiting) - _MOST} more; all of them are in --json")
    for line in found.evidence:
        sink.say(f"  [dim]{escape(line)}[/]", markup=True)
    for line in found.unknown:
        sink.say(f"  [cyan]?[/] {escape(line)}", markup=True)
    who = f"rank {found.culprit}: " if found.culprit is not None else ""
    sink.say(f"[bold]{who}{escape(found.cause)}[/]", markup=True)
    if found.advice:
        sink.say(f"  [bold]{escape(found.advice)}[/]", markup=True)
