"""A launch over more hosts than are entered at once: all report, the lost ones are named, nothing is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.bench.launch_scale import once

HOSTS = 80


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="each host has processes of its own (unshare --pid): run as root")
@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is missing: apt-get install util-linux")
def test_hosts_report_are_lost_by_name_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = once(HOSTS, 2, 4, tmp_path)
    assert (found["ranks"], found["processes_left"]) == (2 * HOSTS, 0)
    assert found["named_s"] < found["ended_s"] + 1.0
