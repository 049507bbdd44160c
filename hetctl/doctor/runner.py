"""From an inventory to findings: one round trip per host, more only where a chosen check needs it.

Every rule is asked about every host it concerns; one that breaks is unknown, never a pass.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hetctl.comm.contract.units import count_of
from hetctl.discovery.discover import discover
from hetctl.discovery.fabric import build
from hetctl.discovery.inventory import Inventory, InventoryHost
from hetctl.discovery.links import measure_links
from hetctl.doctor import between, flow, perf
from hetctl.doctor.check import Check, CheckedCluster, Finding, HostCase
from hetctl.doctor.registry import rank
from hetctl.doctor.verdict import WORST_FIRST, Verdict
from hetctl.probe import Options
from hetctl.probe.raw import printable
from hetctl.trainer.planning.own_hardware import own_classes

_AGAIN_S = 2.0  # between two readings of error counters
C = TypeVar("C", HostCase, CheckedCluster)


@dataclass(frozen=True)
class CheckRun:
    """What was found, over which facts, by which checks."""

    findings: tuple[Finding, ...]
    checked: CheckedCluster
    checks: tuple[Check, ...]
    seconds: float


def examine(
    inventory: Inventory,
    checks: Sequence[Check],
    *,
    timeout_s: float,
    folders: Sequence[str] = (),
    say: Callable[[str], None] = lambda sentence: None,
) -> CheckRun:
    """Ask the hosts, try what the checks need, judge. A host that does not answer is a finding, not an error."""
    began = time.monotonic()
    entries = inventory.entries
    ids = {check.id for check in checks}
    answers = discover(entries, timeout_s=timeout_s, options=lambda e: options_for(e, ids=ids, folders=folders))
    reports = tuple(a.report for a in answers)
    checked = CheckedCluster(reports, build(reports, named=inventory.networks, classes=own_classes(None)).cluster)
    reached = [e for e in entries if e.name in checked.facts]
    program = perf.program_for(ids)
    if program is not None:
        cases = checked.cases
        chosen = [e for e in reached if perf.worth_asking(cases[e.name], program)]
        if chosen:
            say(f"computing on {count_of(len(chosen), 'host')}")
            checked = replace(checked, performance=perf.measure(chosen, checked, program, timeout_s=timeout_s))
    if ids & between.NEED_TRAFFIC and len(reached) > 1:
        say("trying every pair of hosts")
        checked = between.tried(reached, checked, timeout_s=timeout_s, folders=folders)
    if ids & {"perf.pair"} and len(reached) > 1:
        say("measuring between hosts")
        checked = replace(checked, cluster=measure_links(checked.cluster, reached, timeout_s=timeout_s))
    return CheckRun(tuple(judge(checked, checks)), checked, tuple(checks), time.monotonic() - began)


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


def options_for(entry: InventoryHost, *, ids: set[str], folders: Sequence[str]) -> Options:
    """What a host's probe is asked for. On this machine ranks run on the Python that runs hetctl."""
    local = entry.access.local
    tried = (*folders, *([str(Path.cwd() / "runs")] if local else []), "/tmp") if "host.disk" in ids else ()
    return Options(
        interpreters=(sys.executable,) if local else (),
        environment=tuple(entry.access.env),
        thorough=True,
        again_s=_AGAIN_S if ids & flow.WATCHING else 0.0,
        folders=tuple(dict.fromkeys(tried)),
    )


def _findings(checked: CheckedCluster, check: Check) -> list[Finding]:
    if check.rule is not None:
        cases = [HostCase(r, checked) for r in checked.reports if r.ok or check.of_silent]
        return [_finding(check, case.name, verdict) for case in cases for verdict in _guarded(check.rule, case)]
    assert check.survey is not None
    return [_finding(check, v.about or "all", v) for v in _guarded(check.survey, checked)]


def _guarded(ask: Callable[[C], Verdict | Iterable[Verdict]], about: C) -> list[Verdict]:
    try:
        said = ask(about)
        return [said] if isinstance(said, Verdict) else list(said)
    except Exception as error:
        return [Verdict("unknown", f"the check itself broke: {type(error).__name__}: {error}")]


def _finding(check: Check, host: str, verdict: Verdict) -> Finding:
    template = (verdict.fix or check.fix) if verdict.state != "ok" else ""
    values = {"host": host, **verdict.values}
    fix = re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1]) or m[1].upper()), template)
    reason, fix = printable(verdict.reason, limit=400), printable(fix, limit=800)
    return Finding(check.id, host, verdict.state, reason, fix, check.essential, check.source)
