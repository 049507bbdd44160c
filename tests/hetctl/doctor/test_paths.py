"""Ways through a subnet: recorded traces and records, the small program that asks for them, and who is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.doctor import reach
from hetctl.doctor.check import FabricPath
from hetctl.doctor.paths import parse_record, parse_route, question, traced, ways_to_trace
from tests.hetctl.doctor.healthy_hosts import all_of, checked, every_nic, nic, reports
from tests.rigs.dress import tool

FACTS = Path(__file__).resolve().parents[2] / "facts"


def recorded(case: str) -> str:
    return (FACTS / case / "output.txt").read_text()


@pytest.mark.parametrize(
    ("case", "switches"),
    [
        ("leaf-spine-leaf", ("su1-leaf-r1", "spine01", "su2-leaf-r1")),
        ("one-switch-without-names", ("MF0;switch01:SX6036/U1",)),
        ("no-route", None),
    ],
)
def test_routes(case: str, switches: tuple[str, ...] | None) -> None:
    assert parse_route(recorded(f"ibtracert/{case}")) == switches


@pytest.mark.parametrize(
    ("case", "found"),
    [("ndr-4096", (4096, 50e9)), ("edr-2048-older", (2048, 12.5e9)), ("no-record", (None, None))],
)
def test_records(case: str, found: tuple[int | None, float | None]) -> None:
    assert parse_record(recorded(f"saquery-path/{case}")) == found


def test_each_host_traces_to_the_next_one_of_its_subnet_and_only_there() -> None:
    ways = ways_to_trace(checked(reports()))
    asked = {host: [(there, question(a, b)) for there, a, b in each] for host, each in ways.items()}
    assert asked == {  # hosts 2 and 3 are on RoCE
        "node0": [
            ("node1", {"device": "mlx5_0", "port": 1, "from": 1, "to": 65}),
            ("node1", {"device": "mlx5_1", "port": 1, "from": 2, "to": 66}),
        ],
        "node1": [
            ("node0", {"device": "mlx5_0", "port": 1, "from": 65, "to": 1}),
            ("node0", {"device": "mlx5_1", "port": 1, "from": 66, "to": 2}),
        ],
    }
    alone = every_nic(subnet_prefix="fec0:0000:0000:0001")
    assert ways_to_trace(checked(reports(node1=alone))) == {}
    one_port = all_of(nic(1, state="down"))
    assert [len(each) for each in ways_to_trace(checked(reports(node1=one_port))).values()] == [1, 1]


def ask(folder: Path, route: str, record: str, monkeypatch: pytest.MonkeyPatch) -> FabricPath:
    if route:
        tool(folder, "ibtracert", {"-C mlx5_0 -P 1 1 65": route}, delay_s=0)
        tool(folder, "saquery", {"-C mlx5_0 -P 1 --src-to-dst 1:65": record}, delay_s=0)
    monkeypatch.setenv("PATH", str(folder))
    [(_, here, there), *_] = ways_to_trace(checked(reports()))["node0"]
    [said] = reach.at_once(reach.trace, [question(here, there)])
    return traced("node0", "node1", (here, there), said)


def test_a_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(tmp_path, recorded("ibtracert/leaf-spine-leaf"), recorded("saquery-path/edr-2048-older"), monkeypatch)
    assert (found.mtu, found.rate_bytes_per_s, found.end_mtu, found.end_rate) == (2048, 12.5e9, 4096, 50e9)
    assert found.switches == ("su1-leaf-r1", "spine01", "su2-leaf-r1")
    assert (found.way, found.problem) == ("LID 1 to 65", "")


@pytest.mark.parametrize(
    ("route", "record", "problem"),
    [
        (recorded("ibtracert/no-route"), recorded("saquery-path/ndr-4096"), "no route"),
        ("", "", "ibtracert and saquery are not installed"),
        (
            "ibwarn: [1] mad_rpc_open_port: can't open UMAD port ((null):0)\n",
            "ibpanic: [2] main: Failed to bind to the SA: Permission denied\n",
            "ibtracert and saquery need permission for /dev/infiniband/umad*",
        ),
    ],
)
def test_why_a_way_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, record: str, problem: str
) -> None:
    assert ask(tmp_path, route, record, monkeypatch).problem == problem
