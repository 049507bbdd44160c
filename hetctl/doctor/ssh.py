"""Can every host be entered, and is it who it claims to be?"""

from __future__ import annotations

import statistics

from hetctl.doctor.check import Check, HostCase
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn

KEYS = ("unknown-host-key", "host-key-changed")
ENTERED = ("no-python", "python-unsupported", "no-answer", "too-much-output", "command-refused")
_SLOW_S = 1.0


def reach(case: HostCase) -> Verdict:
    report = case.report
    if report.access.local:
        return ok("this machine, without SSH")
    if report.status in KEYS:
        return unknown("it answers, and was not entered: see ssh.hostkey")
    if report.status in ENTERED:
        return ok("it answers")
    if not report.ok:
        return fail(f"{report.status}: {report.reason}", ssh_line(case))
    way = way_s(case)
    usual = statistics.median(
        [way_s(HostCase(r, case.checked)) for r in case.checked.reports if r.ok and not r.access.local]
    )
    if way > max(_SLOW_S, 3 * usual):
        return warn(f"entering it takes {way:.1f} s, the others {usual:.1f} s", ssh_line(case))
    return ok(f"{way:.1f} s")


def hostkey(case: HostCase) -> Verdict:
    report = case.report
    if report.access.local:
        return ok("this machine, without SSH")
    if report.status == "unknown-host-key":
        return fail(report.reason or "its key is not known", f"hetctl hosts trust {report.name}")
    if report.status == "host-key-changed":
        line = f"ask who changed it; then remove the old key, and: hetctl hosts trust {report.name}"
        return fail(report.reason or "its key changed", report.hint or line)
    if report.ok or report.status in ENTERED:
        return ok("the key it shows is the pinned one")
    if report.status in ("authentication-failed", "connection-lost"):
        return ok("the key it shows is the pinned one")
    return unknown("it was not reached")


def way_s(case: HostCase) -> float:
    """Seconds spent on the way there and back, the probe's own work taken out."""
    worked = case.facts.system.probe_seconds or 0.0
    return max(0.0, case.report.seconds - worked)


def ssh_line(case: HostCase) -> str:
    access = case.report.access
    words = ["ssh -v -o BatchMode=yes"]
    words += [f"-p {access.port}"] if access.port else []
    words += [f"-i {access.identity_file}"] if access.identity_file else []
    words += [f"-J {access.proxy_jump}"] if access.proxy_jump else []
    target = f"{access.user}@{access.address}" if access.user else str(access.address)
    return " ".join([*words, target, "true"])


CHECKS = (
    Check(
        "ssh.reach",
        "connect, authenticate, one round trip",
        "DeepSpeed and CVS check the first host only; every host here",
        rule=reach,
        of_silent=True,
        essential=True,
    ),
    Check(
        "ssh.hostkey",
        "the key it shows and known_hosts",
        "CodeQL py/paramiko-missing-host-key-validation",
        rule=hostkey,
        of_silent=True,
    ),
)
