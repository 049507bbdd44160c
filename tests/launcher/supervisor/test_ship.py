"""Data to real hosts that see nothing of this machine's: whole, once, and a host without room is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import HetctlError
from hetctl.console import Sink
from hetctl.launcher.ssh.config import SshConfig
from hetctl.launcher.ssh.connect import connect
from hetctl.launcher.supervisor.agents import TargetHost
from hetctl.launcher.supervisor.ship import Shipment, ship
from tests.rigs import netns

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
CONTENT = bytes(range(256)) * 12_000  # 3 MB: more than a pipe or a chunk holds


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "text" / "deep").mkdir(parents=True)
    (folder / "text" / "empty").touch()
    (folder / "text" / "deep" / "b.txt").write_bytes(CONTENT)
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[list[tuple[TargetHost, Path]]]:
    specs = [netns.HostSpec(hide=(str(mine),), home_mib=mib) for mib in (0, 0, 2)]
    with netns.hosts(specs, tmp_path_factory.mktemp("rig")) as rig, SshConfig(rig.home) as config:
        made = []
        for host in rig.hosts:
            access = Access(host.name, python=sys.executable)
            opener = lambda deadline, access=access: connect(access, config, deadline)  # noqa: E731
            made.append((TargetHost(host.name, access, opener, host.address), host.folder / "home"))
        yield made


def test_hosts_hold_what_was_sent_and_are_sent_it_once(
    targets: list[tuple[TargetHost, Path]], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [target for target, _ in targets[:2]]
    folder = Shipment(mine / "text", (mine / "text" / "deep" / "b.txt", mine / "text" / "empty"))
    file = Shipment(mine / "text" / "deep" / "b.txt", (mine / "text" / "deep" / "b.txt",))
    places = ship(two, [folder, file], Sink())
    for target, home in targets[:2]:
        there = places[target.name]
        assert Path(there[str(mine / "text")], "deep", "b.txt").read_bytes() == CONTENT
        assert Path(there[str(file.path)]).read_bytes() == CONTENT
        assert home in Path(there[str(file.path)]).parents
    said = capsys.readouterr().out
    assert f"sent {mine / 'text'} (2.9 MiB) to {two[0].name[:-1]}[0-1], kept in ~/.cache/hetctl/data (2.9 MiB" in said
    assert ship(two, [folder, file], Sink()) == places
    assert "sent" not in capsys.readouterr().out


def test_a_host_without_room_is_named(targets: list[tuple[TargetHost, Path]], mine: Path) -> None:
    with pytest.raises(HetctlError, match=r"(?s)1 of 3 hosts cannot.*h2: 3 MB are needed") as raised:
        ship([target for target, _ in targets], [Shipment(mine / "text", (mine / "text" / "deep" / "b.txt",))], Sink())
    assert len(raised.value.hosts) == 1
