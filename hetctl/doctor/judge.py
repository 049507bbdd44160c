"""Facts to findings: every rule asked about every host it concerns; a rule that breaks is unknown, never a pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hetctl.doctor.check import WORST_FIRST, Check, CheckedCluster, Finding, HostCase, Verdict
from hetctl.doctor.registry import rank
from hetctl.probe.raw import printable


def judge(checked: CheckedCluster, checks: Sequence[Check]) -> list[Finding]:
    """The findings of these checks, in the checks' order."""
    return [finding for check in checks for finding in _findings(checked, check)]


def to_mend(findings: Iterable[Finding]) -> list[Finding]:
    """What failed, in the order in which it should be mended."""
    return sorted((f for f in findings if f.state == "fail"), key=lambda f: rank(f.check))


def first_of(findings: Sequence[Finding]) -> Finding | None:
    """What to look at first: the first failure, else the first warning; unknowns of what is essential between."""
    failures = to_mend(findings)
    unsure = [f for f in findings if f.state == "unknown" and f.essential]
    warnings = sorted((f for f in findings if f.state == "warn"), key=lambda f: rank(f.check))
    return next(iter((*failures, *unsure, *warnings)), None)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 all ok or warnings only, 1 something failed, 3 something essential is unknown, 4 only that hosts are away."""
    failed = [f for f in findings if f.state == "fail"]
    if failed:
        return 4 if all(f.check in ("ssh.reach", "ssh.hostkey") for f in failed) else 1
    return 3 if any(f.state == "unknown" and f.essential for f in findings) else 0


def state_of(findings: Iterable[Finding]) -> str:
    """The worst state among them."""
    states = {f.state for f in findings}
    return next((s for s in WORST_FIRST if s in states), "ok")


def _findings(checked: CheckedCluster, check: Check) -> list[Finding]:
    if check.rule is not None:
        rule = check.rule
        asked = [r for r in checked.reports if r.ok or check.of_silent]
        return [
            _finding(check, report.name, verdict)
            for report in asked
            for verdict in _guarded(lambda report=report: [rule(HostCase(report, checked))])  # type: ignore[misc]
        ]
    survey = check.survey
    assert survey is not None
    return [_finding(check, v.about or "all", v) for v in _guarded(lambda: survey(checked))]


def _guarded(ask: Callable[[], Iterable[Verdict]]) -> list[Verdict]:
    try:
        return list(ask())
    except Exception as error:
        return [Verdict("unknown", f"the check itself broke: {type(error).__name__}: {error}")]


def _finding(check: Check, host: str, verdict: Verdict) -> Finding:
    template = (verdict.fix or check.fix) if verdict.state != "ok" else ""
    values = {"host": host, **verdict.values}
    fix = re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1]) or m[1].upper()), template)
    reason, fix = printable(verdict.reason, limit=400), printable(fix, limit=400)
    return Finding(check.id, host, verdict.state, reason, fix, check.essential, check.source)
