"""Strangers of all kinds at all ports of a run, from beside its hosts: it ends well, with the losses of a quiet one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.drive import stage
from tests.faults.strangers import KINDS, SETTINGS, STEPS, Attack, attack, open_ports, recordings
from tests.rigs import netns

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
WHY_NOT = netns.unavailable()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_strangers_end_no_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with stage(tmp_path_factory.mktemp("s") / "r", steps=STEPS, settings=SETTINGS, others=1) as on:
        recorded = recordings(on)
        for kind in KINDS:
            made = attack(on, Attack(kind, "", ""), recorded, inside=False)
            assert made.tried
            assert not made.problems, made


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_security_md_names_every_port_that_a_run_opens(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\w+) \|", SECURITY.read_text(), re.MULTILINE)
    named = {process for _, process in rows} - {"process"}
    with stage(tmp_path_factory.mktemp("s") / "r", steps=8, settings=("checkpoint.every=4",), others=1) as on:
        ports = open_ports(on)
        own = {address for host in on.rig.hosts[:2] for address in (*host.rails, host.address)}
    assert {port.role for port in ports} == named
    bound = {port.place.rpartition(":")[0] for port in ports}
    assert bound <= own, "on a run's own addresses only, never on all of a host's"
