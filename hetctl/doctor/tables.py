"""Findings for people: a line per theme (or per check), under it what is not well with its hosts, the reason and a line
to paste; drift; a run's diagnosis.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract.units import count_of, listed, show_seconds
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.doctor.check import Check, Finding
from hetctl.doctor.registry import THEMES
from hetctl.doctor.runner import CheckRun, exit_code, first_of, state_of, to_mend
from hetctl.doctor.runs import Diagnosis
from hetctl.doctor.software import Drift, drift
from hetctl.doctor.verdict import State

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow] ![/]", "fail": "[red] x[/]", "unknown": "[cyan] ?[/]"}
WORDS: dict[State, str] = {"fail": "failed", "warn": "to look at", "unknown": "unknown", "ok": "ok"}
_MOST_WAITING = 16


def show_findings(sink: Sink, found: CheckRun, *, verbose: bool) -> None:
    """Everything a person should see, the most urgent last, where the eye is."""
    for theme in THEMES:
        of_theme = [f for f in found.findings if f.check.partition(".")[0] == theme]
        if of_theme and verbose:
            sink.say(f"[bold]{theme}[/]", markup=True)
            for check in dict.fromkeys(f.check for f in of_theme):
                show_check(sink, [f for f in of_theme if f.check == check])
        elif of_theme:
            show_theme(sink, theme, of_theme)
    numbers = numerics_table(found) if verbose else None
    for table in filter(None, (drift_table(drift(found.checked), verbose=verbose), numbers)):
        sink.say()
        sink.say(table)
    sink.say()
    for line in closing(found.findings):
        sink.say(line, markup=True)
    hosts = count_of(len(found.checked.reports), "host")
    sink.say(f"[dim]{len(found.checks)} checks, {hosts}, {show_seconds(found.seconds)}[/]", markup=True)


def show_theme(sink: Sink, theme: str, findings: Sequence[Finding]) -> None:
    """One line; under it what is not well, with its hosts and the reason, the same sentence once."""
    checks: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        checks[finding.check].append(finding)
    states = [state_of(found) for found in checks.values()]
    counts = ", ".join(f"{states.count(s)} {w}" for s, w in WORDS.items() if s in states)
    sink.say(f"{MARKS[state_of(findings)]} {theme:<8} [dim]{counts}[/]", markup=True)
    for check, found in checks.items():
        for (how, reason, fix), hosts in _alike([f for f in found if f.state != "ok"]).items():
            sink.say(f"  {MARKS[how]} [bold]{check}[/] {escape(listed(hosts))}: {escape(reason)}", markup=True)
            if fix and how != "unknown":
                sink.say(f"       [bold]{escape(fix)}[/]", markup=True)


def show_check(sink: Sink, findings: Sequence[Finding]) -> None:
    """One line, and under it every reason, the same sentence about several hosts once."""
    state = state_of(findings)
    sink.say(f"{MARKS[state]} {findings[0].check:<20} {_summary(findings)}", markup=True)
    for (_, reason, fix), hosts in _alike(findings).items():
        sink.say(f"     {escape(listed(hosts))}: {escape(reason)}", markup=True)
        if fix:
            sink.say(f"       [bold]{escape(fix)}[/]", markup=True)
    if findings[0].source:
        sink.say(f"       [dim]after {escape(findings[0].source)}[/]", markup=True)


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.state for finding in findings)
    reasons = {f.reason for f in findings}
    if len(reasons) == 1 and state_of(findings) in ("ok", "unknown"):
        return f"[dim]{escape(reasons.pop())}[/]"
    return "[dim]" + ", ".join(f"{counts[s]} {w}" for s, w in WORDS.items() if counts[s]) + "[/]"


def _alike(findings: Sequence[Finding]) -> dict[tuple[str, str, str], list[str]]:
    """(state, reason, line to paste) -> hosts; lines that differ in the host's name alone stand as the first one's."""
    found: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        found[finding.state, finding.reason, finding.fix.replace(finding.host, "HOST")].append(finding)
    return {(state, reason, group[0].fix): [f.host for f in group] for (state, reason, _), group in found.items()}


def drift_table(rows: Sequence[Drift], *, verbose: bool) -> Table | None:
    """What differs inside each vendor group (with `verbose` also what does not); None when there is nothing."""
    shown = [r for r in rows if verbose or len(r.values) > 1]
    if not shown:
        return None
    heads = ("group", "what", "value", "hosts")
    table = Table(*heads, box=None, pad_edge=False, title="drift inside vendor groups", title_justify="left")
    for row in shown:
        for value, hosts in sorted(row.values.items(), key=lambda pair: -len(pair[1])):
            table.add_row(escape(row.group), row.what, escape(value), escape(listed(hosts)))
    return table


def numerics_table(found: CheckRun) -> Table | None:
    """The numerics gate's figures of each host's first device, forward / backward; None where nothing was measured."""
    heads = ("host", "operation", "dtype", "largest", "mean", "common factor", "cosine")
    table = Table(*heads, box=None, pad_edge=False, title="against fp64, in eps of the dtype", title_justify="left")
    for host, measured in found.checked.performance.items():
        for device in (measured.get("devices") or [])[:1]:
            for row in device.get("numerics") or ():
                ways = (row["forward"], row["backward"])
                figures = [" / ".join(_figure(w[key]) for w in ways) for key in ("max_eps", "mean_eps", "scale_eps")]
                cosines = " / ".join("?" if w["cosine"] is None else f"{w['cosine']:.7f}" for w in ways)
                table.add_row(escape(host), row["operation"], row["dtype"], *figures, cosines)
    return table if table.row_count else None


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def closing(findings: Sequence[Finding]) -> list[str]:
    """`2 problems, first fix this: ...`, or that there is nothing to fix."""
    failures, first = to_mend(findings), first_of(findings)
    if first is None:
        return ["[green]nothing is wrong[/]"]
    what = f"{escape(first.host)}: {first.check}: {escape(first.reason)}"
    if failures:
        lines = [f"[red]{count_of(len(failures), 'problem')}[/], first fix this: {what}"]
    elif first.state == "unknown":
        lines = [f"[cyan]no problem found, but something essential is unknown[/]: {what}"]
    else:
        count = sum(f.state == "warn" for f in findings)
        lines = [f"[yellow]no problem, {count_of(count, 'thing')} to look at[/], first this: {what}"]
    return [*lines, f"  [bold]{escape(first.fix)}[/]"] if first.fix else lines


def check_table(checks: Sequence[Check]) -> Table:
    """What can be checked: id, level, how it is read, and what root would add."""
    table = Table("check", "level", "reads", "with root", box=None, pad_edge=False)
    for check in checks:
        name = f"{check.id}{' *' if check.essential else ''}"
        table.add_row(name, check.level, escape(check.reads), escape(check.root))
    table.caption = "* essential: exit code 3 when it is unknown"
    return table


def document(found: CheckRun, *, level: str) -> dict[str, Any]:
    """The JSON document of a check-up."""
    first = first_of(found.findings)
    return {
        "level": level,
        "hosts": [r.name for r in found.checked.reports],
        "findings": [encode(f) for f in found.findings],
        "performance": {host: _without_samples(found_) for host, found_ in found.checked.performance.items()},
        "drift": [encode(d) for d in drift(found.checked)],
        "problems": len(to_mend(found.findings)),
        "first": encode(first) if first is not None else None,
        "seconds": found.seconds,
        "exit_code": exit_code(found.findings),
    }


def _without_samples(data: Any) -> Any:
    """What a host measured, without the values that only served to compare devices."""
    if isinstance(data, Mapping):
        return {key: _without_samples(value) for key, value in data.items() if key != "sample"}
    return [_without_samples(value) for value in data] if isinstance(data, list) else data


def list_document(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The JSON of `--list`."""
    names = ("id", "level", "essential", "reads", "fix", "source", "root")
    return [{name: getattr(check, name) for name in names} | {"theme": check.theme} for check in checks]


def show_diagnosis(sink: Sink, found: Diagnosis) -> None:
    """How a run ended, who waited for whom, what to type; the cause last, where the eye is."""
    sink.say(f"run {found.run}: {found.status}")
    for one in found.waiting[:_MOST_WAITING]:
        whom = ", ".join(f"rank {r}" for r in one.targets[:8]) or "somebody it cannot name"
        sink.say(f"  rank {one.rank} waited for {whom} in {one.operation} (group {one.group or '?'})")
    if len(found.waiting) > _MOST_WAITING:
        sink.say(f"  and {len(found.waiting) - _MOST_WAITING} more; all of them are in --json")
    for line in found.evidence:
        sink.say(f"  [dim]{escape(line)}[/]", markup=True)
    for line in found.unknown:
        sink.say(f"  [cyan]?[/] {escape(line)}", markup=True)
    who = f"rank {found.culprit}: " if found.culprit is not None else ""
    sink.say(f"[bold]{who}{escape(found.cause)}[/]", markup=True)
    if found.advice:
        sink.say(f"  [bold]{escape(found.advice)}[/]", markup=True)
