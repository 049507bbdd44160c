"""From an inventory to findings: one round trip per host, more only where a chosen check needs it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.discovery.discover import HostAnswer, discover
from hetctl.discovery.fabric import Report, build
from hetctl.discovery.inventory import Inventory, InventoryHost
from hetctl.discovery.links import measure_links
from hetctl.doctor import between, perf
from hetctl.doctor.check import Check, CheckedCluster, Finding
from hetctl.doctor.judge import judge
from hetctl.probe import Options

_AGAIN_S = 2.0  # between two readings of error counters


@dataclass(frozen=True)
class Examination:
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
    options: Callable[[InventoryHost], Options] | None = None,
    on_answer: Callable[[HostAnswer], None] = lambda answer: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Examination:
    """Ask the hosts, try what the checks need, judge. A host that does not answer is a finding, not an error."""
    began = time.monotonic()
    entries = inventory.entries
    ids = {check.id for check in checks}
    ask = options or (lambda entry: options_for(entry, ids=ids, folders=folders))
    answers = discover(entries, timeout_s=timeout_s, options=ask, on_answer=on_answer)
    checked = ward_of([a.report for a in answers], inventory)
    reached = [e for e in entries if e.name in checked.facts]
    program = perf.program_for(ids)
    if program is not None:
        chosen = [e for e in reached if perf.worth_asking(checked.facts[e.name], program)]
        if chosen:
            say(f"computing on {len(chosen)} host{'s' * (len(chosen) > 1)}")
            checked = replace(checked, performance=perf.measure(chosen, checked, program, timeout_s=timeout_s))
    if ids & between.NEED_TRAFFIC and len(reached) > 1:
        say("trying every pair of hosts")
        checked = between.tried(reached, checked, timeout_s=timeout_s, folders=folders)
    if ids & {"perf.pair"} and len(reached) > 1:
        say("measuring between hosts")
        checked = replace(checked, cluster=measure_links(checked.cluster, reached, connect_s=timeout_s))
    return Examination(tuple(judge(checked, checks)), checked, tuple(checks), time.monotonic() - began)


def ward_of(reports: Sequence[Report], inventory: Inventory) -> CheckedCluster:
    """The hosts and the cluster they make."""
    return CheckedCluster(tuple(reports), build(reports, named=inventory.networks).cluster)


def options_for(entry: InventoryHost, *, ids: set[str], folders: Sequence[str]) -> Options:
    """What a host's probe is asked for. On this machine ranks run on the Python that runs hetctl."""
    local = entry.access.local
    tried = (*folders, *([str(Path.cwd() / "runs")] if local else []), "/tmp") if "host.disk" in ids else ()
    return Options(
        interpreters=(sys.executable,) if local else (),
        environment=tuple(entry.access.env),
        thorough=True,
        again_s=_AGAIN_S if ids & {"rdma.counters", "roce.pfc_ecn"} else 0.0,
        folders=tuple(dict.fromkeys(tried)),
    )
