"""What the doctor shows: a line a theme, what is not well with its hosts and reasons, and everything when asked."""

from __future__ import annotations

import io

from rich.console import Console

from hetctl.comm.contract.cluster import Access, Cluster
from hetctl.console import Sink
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import CheckedCluster, Finding
from hetctl.doctor.runner import CheckRun
from hetctl.doctor.tables import show_findings

FINDINGS = (
    Finding("net.mtu", "a", "ok", "1500 all over"),
    Finding("net.speed", "a", "unknown", "the driver tells no speed", fix="ethtool eth0"),
    Finding("net.speed", "b", "unknown", "the driver tells no speed", fix="ethtool eth0"),
    Finding("net.speed", "c", "ok", "25 Gb/s"),
    Finding("gpu.ecc_ras", "b", "fail", "errors", fix="reset it"),
    Finding("gpu.count", "b", "ok", "8 GPUs"),
    Finding("lim.nofile", "a", "ok", "65536"),
)


def shown(*, verbose: bool) -> list[str]:
    sink = Sink()
    sink.people = Console(file=io.StringIO(), width=120, color_system=None)
    reports = tuple(Report(name, Access()) for name in "abc")
    run = CheckRun(FINDINGS, CheckedCluster(reports, Cluster((), ())), (), 1.0)
    show_findings(sink, run, verbose=verbose)
    assert isinstance(sink.people.file, io.StringIO)
    return [line.rstrip() for line in sink.people.file.getvalue().splitlines()]


def test_a_theme_is_one_line_and_what_is_not_well_stands_under_it() -> None:
    lines = shown(verbose=False)
    assert lines[: lines.index("")] == [
        " ? net      1 unknown, 1 ok",
        "   ? net.speed a, b: the driver tells no speed",
        "ok lim      1 ok",
        " x gpu      1 failed, 1 ok",
        "   x gpu.ecc_ras b: errors",
        "       reset it",
    ]


def test_everything_is_shown_when_asked() -> None:
    lines = shown(verbose=True)
    for finding in FINDINGS:
        assert any(finding.check in line for line in lines)
        assert any(finding.reason in line for line in lines)
    assert "       ethtool eth0" in lines
