"""What the doctor's checks say of claims: its findings, on all hosts, as `hetctl doctor --json` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetctl.console import Sink
from hetctl.discovery.inventory import Inventory
from hetctl.doctor.check import Level
from hetctl.doctor.registry import choose
from hetctl.doctor.runner import examine
from hetctl.doctor.tables import document
from hetctl.validate.claims import Judgement, Measure, could_not_tell, does_not_hold, holds
from hetctl.validate.ground import ClaimHosts

_STATES = ("ok", "warn", "fail", "unknown")
_SHOWN = 4  # findings in a sentence


def examined(level: Level, *only: str, most_s: float) -> Measure:
    """The document of the doctor's checks of these ids or themes."""

    def measure(ground: ClaimHosts, folder: Path, sink: Sink) -> dict[str, Any]:
        checks = choose(level=level, only=only)
        found = examine(Inventory(ground.entries, "validation"), checks, timeout_s=min(most_s, ground.timeout_s))
        for finding in found.findings:
            sink.say(f"{finding.state} {finding.check} {finding.host}: {finding.reason}")
        return document(found, level=level)

    return measure


def judge_numerics(found: dict[str, Any], ground: ClaimHosts) -> Judgement:
    """No device computes wrongly, and every one was tried."""
    findings = [f for f in found["findings"] if f["check"] == "perf.numerics"]
    said = {s: [f"{f['host']}: {f['reason']}" for f in findings if f["state"] == s] for s in ("fail", "unknown", "ok")}
    figures = {"findings": said}
    if said["fail"]:
        return does_not_hold("; ".join(said["fail"][:_SHOWN]), figures)
    if said["unknown"] or not findings:
        return could_not_tell("; ".join(said["unknown"][:_SHOWN]) or "no device was tried", figures)
    return holds("; ".join(said["ok"]), figures)


def judge_rdma(found: dict[str, Any], ground: ClaimHosts) -> Judgement:
    """All could be read; whether what the doctor says of the ports is true, a person compares."""
    findings = found["findings"]
    figures = {"states": {s: sum(f["state"] == s for f in findings) for s in _STATES}}
    if unread := [f for f in findings if f["state"] == "unknown"]:
        words = "; ".join(f"{f['host']}: {f['check']}: {f['reason']}" for f in unread[:_SHOWN])
        return could_not_tell(f"{len(unread)} findings are unknown: {words}", figures)
    return holds(f"{len(findings)} findings, none unknown; compare them with what you know", figures)
