"""Discovery over SSH of hosts dressed as every recording there is, all at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetctl.comm.contract.cluster import load_cluster
from hetctl.discovery.devices import devices_of
from hetctl.probe import parse
from hetctl.probe.wanted import wanted
from tests.hetctl.discovery.test_discover_hosts import Run, hetctl
from tests.hetctl.probe.recordings import TOOLS, Recorded, recordings
from tests.rigs import netns
from tests.rigs.dress import dress_recording

WHY_NOT = netns.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
ASKED = {"lspci", *wanted().tools}
CASES = [c for c in recordings() if {TOOLS.get(name, name) for name in c.outputs} <= ASKED]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("rig")
    dresses = [dress_recording(folder / f"dress{n}", case.raw(), n) for n, case in enumerate(CASES)]
    specs = [netns.HostSpec(tools={"python3": netns.dressed_python(dress)}) for dress in dresses]
    with netns.hosts(specs, folder) as rig:
        yield hetctl(rig, folder, "discover", *(host.name for host in rig.hosts), "--timeout", "120")


def test_all_are_read_and_nothing_is_thrown(run: Run) -> None:
    assert "Traceback" not in run.stderr
    states = {case.name: run.host(n)["status"] for n, case in enumerate(CASES)}
    assert {name: state for name, state in states.items() if state != "ok"} == {}
    assert run.exit_code == 0, run.stderr
    load_cluster(run.folder / "cluster.yaml")


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=[case.name for case in CASES])
def test_its_devices_are_those_of_the_recording(number: int, case: Recorded, run: Run) -> None:
    expected = devices_of(parse(case.raw()), ())
    assert [d["device_class"] for d in run.host(number)["devices"]] == [d.device_class for d in expected.devices]
    said = [note["sentence"] for note in run.document["notes"] if note.get("host") == run.host(number)["name"]]
    assert [words for words in expected.notes if words not in said] == []
