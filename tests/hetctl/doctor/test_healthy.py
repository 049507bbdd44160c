"""Healthy hosts of two vendors: nothing fails, nothing is to be looked at, nothing is unknown."""

from __future__ import annotations

from hetctl.doctor.registry import CHECKS
from hetctl.doctor.runner import exit_code, first_of, judge
from tests.hetctl.doctor import healthy_hosts


def test_a_healthy_mixed_cluster_has_no_finding_but_ok() -> None:
    findings = judge(healthy_hosts.checked(healthy_hosts.reports()), CHECKS)
    assert [(f.check, f.host, f.state, f.reason) for f in findings if f.state != "ok"] == []
    assert exit_code(findings) == 0
    assert first_of(findings) is None
    assert {f.check for f in findings} == {c.id for c in CHECKS}
