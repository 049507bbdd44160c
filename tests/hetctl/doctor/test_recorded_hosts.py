"""Every recording as a host, alone and beside its twin: an island or a reason, and no check that breaks."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.discovery.fabric import Report, build
from hetctl.discovery.unusual import unusual
from hetctl.doctor.check import CheckedCluster
from hetctl.doctor.registry import CHECKS
from hetctl.doctor.runner import judge
from hetctl.probe import parse
from tests.hetctl.probe.recordings import Recorded, recordings


@pytest.mark.parametrize("case", recordings(), ids=lambda case: case.name)
@pytest.mark.parametrize("hosts", [1, 2])
def test_no_gpu_is_dropped_unsaid_and_no_check_breaks(case: Recorded, hosts: int) -> None:
    facts = parse(case.raw())
    reports = tuple(Report(f"node{i}", Access(), facts=facts) for i in range(hosts))
    fabric = build(reports)
    left_out = [note.sentence for note in (*fabric.notes, *unusual(reports, fabric.cluster))]
    devices = [device for host in fabric.cluster.hosts for device in host.devices]
    used = {(d.vendor, d.index if d.ordinal is None else d.ordinal) for d in devices}
    assert all((g.vendor, g.index) in used or any(g.id in said for said in left_out) for g in facts.gpus)
    findings = judge(CheckedCluster(reports, fabric.cluster), CHECKS)
    assert [f.reason for f in findings if "the check itself broke" in f.reason] == []
