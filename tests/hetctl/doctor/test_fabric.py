"""What dressed hosts print and show of their fabrics, through the probe and all checks: one ill thing at a time.

The outputs' sources stand in tests/rigs/dress_fabric.py and beside the recordings of tests/facts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.facts import NicFacts
from hetctl.discovery.fabric import Report, build
from hetctl.doctor.check import CheckedCluster, Finding
from hetctl.doctor.registry import CHECKS
from hetctl.doctor.runner import judge
from hetctl.probe import Options, parse
from hetctl.probe import remote as program
from hetctl.probe.port_fabric import with_fabric
from hetctl.probe.raw import Raw, ToolOutput, load
from hetctl.probe.wanted import request
from tests.rigs import recordings
from tests.rigs.dress import Costume, Dress, dress_host, netdev_name, rdma_name, tool, write
from tests.rigs.dress_fabric import dress_fabric, port_folder, sminfo

Change = Callable[[Dress, Costume], None]
FABRIC = ("rdma.sm", "rdma.lid", "rdma.pkey", "rdma.mtu", "rdma.ibdiagnet", "rdma.credits", "rdma.counters", "roce.")
FACTS = Path(__file__).resolve().parents[2] / "facts"
# a user who is not root, on a public course's cluster: sminfo, then saquery (retyped)
NO_UMAD = "ibwarn: [55188] mad_rpc_open_port: can't open UMAD port ((null):0)"
NO_SA = "ibpanic: [55250] main: Failed to bind to the SA: Permission denied"


def findings(folder: Path, fabric: str, *changes: Change, dressed: bool = True) -> list[Finding]:
    """Of two hosts' fabrics, the first host well, the second changed (or both, where there is one change for each)."""
    reports = []
    for number in range(2):
        costume = Costume(f"node{number}", number, gpus=1, nics=2, fabric=fabric, tool_delay_s=0)  # type: ignore[arg-type]
        dress = dress_host(folder / str(number), costume)
        if dressed:
            dress_fabric(dress, costume)
        if changes and (number or len(changes) > 1):
            changes[-1 if number else 0](dress, costume)
        options = Options(root=str(dress.root), path=str(dress.tools), thorough=True, again_s=0.01)
        facts = parse(load(program.collect(request(options))))
        reports.append(Report(f"node{number}", Access(address=f"192.168.0.{number + 1}"), facts))
    checked = CheckedCluster(tuple(reports), build(reports).cluster)
    return judge(checked, [check for check in CHECKS if check.id.startswith(FABRIC)])


def ill(found: list[Finding]) -> dict[str, tuple[str, str]]:
    """Check -> (state, sentence) of what is not ok, the second host's where both say something."""
    return {f.check: (f.state, f.reason) for f in found if f.state != "ok"}


def well(found: list[Finding]) -> dict[str, str]:
    return {f.check: f.reason for f in found if f.state == "ok" and f.host == "node1"}


def shows(file: str, content: str | int) -> Change:
    return lambda dress, costume: write(port_folder(dress, costume, 0), file, content)


def answers(name: str, arguments: str, text: str) -> Change:
    """Each port's tool prints this; {port} and {netdev} in `arguments` are the port's."""

    def change(dress: Dress, costume: Costume) -> None:
        every = {
            arguments.format(port=rdma_name(costume, i), netdev=netdev_name(costume, i)): text
            for i in range(costume.nics)
        }
        tool(dress.tools, name, every, delay_s=0)

    return change


def without(*names: str) -> Change:
    return lambda dress, costume: [(dress.tools / name).unlink() for name in names] and None


def refusing(name: str, stderr: str) -> Change:
    def change(dress: Dress, costume: Costume) -> None:
        (dress.tools / name).write_text(f"#!/bin/sh\necho {shlex.quote(stderr)} >&2\nexit 255\n")

    return change


def both(*changes: Change) -> Change:
    def change(dress: Dress, costume: Costume) -> None:
        for one in changes:
            one(dress, costume)

    return change


def devinfo(active: str) -> Change:
    def change(dress: Dress, costume: Costume) -> None:
        text = recordings.ibv_devinfo([rdma_name(costume, i) for i in range(costume.nics)])
        tool(
            dress.tools,
            "ibv_devinfo",
            {"": text.replace("active_mtu:\t\t4096 (5)", f"active_mtu:\t\t{active}")},
            delay_s=0,
        )

    return change


def keys(*each: int) -> Change:
    return both(*(shows(f"pkeys/{i}", f"{key:#06x}") for i, key in enumerate(each)))


def recorded(case: str) -> str:
    return (FACTS / case / "output.txt").read_text()


def last_report(dress: Dress, costume: Costume) -> None:
    write(dress.root, "/var/tmp/ibdiagnet2/ibdiagnet2.log", recorded("ibdiagnet/fifteen-speed-errors"))


def test_a_healthy_infiniband_fabric_is_a_line_for_each(tmp_path: Path) -> None:
    found = findings(tmp_path, "infiniband")
    assert ill(found) == {}
    assert well(found) == {
        "rdma.sm": "LID 1, priority 14; standby: LID 5 with 3",
        "rdma.lid": "of their own, LMC 0",
        "rdma.pkey": "full members of 0xffff",
        "rdma.mtu": "4096 active as enabled",
        "rdma.ibdiagnet": "no report of ibdiagnet here",
        "rdma.counters": "2 ports without errors",
        "rdma.credits": "hardly a wait for credits",
        "roce.pfc_ecn": "no RoCE port in use",
    }


def test_a_healthy_roce_network_too(tmp_path: Path) -> None:
    found = findings(tmp_path, "roce")
    assert ill(found) == {}
    assert well(found)["roce.pfc_ecn"] == "flow control on priority 3"
    assert well(found)["rdma.mtu"] == "as large as the interfaces allow"
    assert well(found)["rdma.sm"] == "no InfiniBand port in use"


NOBODY = "one answers at LID 1; its priority and who would take over are not known: "
ONE_MASTER = without("saquery")
INFINIBAND: Mapping[str, tuple[tuple[Change, ...], str, str, str]] = {
    "two masters": (
        (ONE_MASTER, both(ONE_MASTER, answers("sminfo", "-C {port} -P 1", sminfo(guid="0x0002c90300000009")))),
        "rdma.sm",
        "fail",
        "one subnet has 2 masters, which do not see each other: 0x0002c90300000001 at LID 1 with priority 14,"
        " 0x0002c90300000009 at LID 1 with priority 14",
    ),
    "a manager elsewhere": (
        (shows("sm_lid", "0x7"),),
        "rdma.sm",
        "warn",
        "mlx5_0 has its subnet manager at LID 7, on the other hosts at LID 1: another subnet, or one that is split",
    ),
    "nothing installed": (
        (without("sminfo", "saquery"),) * 2,
        "rdma.sm",
        "unknown",
        NOBODY + "sminfo is not installed",
    ),
    "not root": (
        (both(refusing("sminfo", NO_UMAD), refusing("saquery", NO_SA)),) * 2,
        "rdma.sm",
        "unknown",
        NOBODY + "sminfo needs permission for /dev/infiniband/umad*",
    ),
    "no umad": (
        (
            both(
                refusing("sminfo", NO_UMAD),
                refusing("saquery", NO_SA),
                lambda dress, costume: [f.unlink() for f in (dress.root / "dev/infiniband").glob("umad*")] and None,
            ),
        )
        * 2,
        "rdma.sm",
        "unknown",
        NOBODY + "sminfo: there is no /dev/infiniband/umad* here",
    ),
    "active without a LID": ((shows("lid", "0x0"),), "rdma.lid", "fail", "ib0 is active without a LID"),
    "one LID twice": (
        (shows("lid", "0x1"),),
        "rdma.lid",
        "warn",
        "ib0 and node0 ib0 have LID 1: two subnets that look like one",
    ),
    "another LMC": ((shows("lid_mask_count", 2),), "rdma.lid", "warn", "ib0 has LMC 2, the others of its subnet 0"),
    "no common partition": (
        (keys(0x8001),),
        "rdma.pkey",
        "fail",
        "ib0 is no full member of a partition of the others (0xffff; its own: 0x8001)",
    ),
    "one limited member": (
        (keys(0x7FFF),),
        "rdma.pkey",
        "warn",
        "ib0 is no full member of a partition of the others (0xffff; its own: 0x7fff): it reaches full members only",
    ),
    "another first key": (
        (keys(0x8001, 0xFFFF),),
        "rdma.pkey",
        "warn",
        "entry 0 of ib0 is 0x8001, of the others 0xffff: NCCL uses entry 0",
    ),
    "a smaller MTU": (
        (devinfo("2048 (4)"),),
        "rdma.mtu",
        "warn",
        "ib0 has an active MTU of 2048, the others of its subnet 4096;"
        " ib1 has an active MTU of 2048, the others of its subnet 4096",
    ),
    "smaller than enabled everywhere": (
        (devinfo("2048 (4)"),) * 2,
        "rdma.mtu",
        "warn",
        "ib0 has an active MTU of 2048, where 4096 is enabled; ib1 has an active MTU of 2048, where 4096 is enabled",
    ),
    "errors in the last report": (
        (last_report,),
        "rdma.ibdiagnet",
        "warn",
        "its report has errors: Speed / Width checks 15",
    ),
}
ROCE: Mapping[str, tuple[tuple[Change, ...], str, str, str]] = {
    "flow control nowhere": (
        (answers("dcb", "pfc show dev {netdev}", recorded("pfc/dcb-all-off")),) * 2,
        "roce.pfc_ecn",
        "warn",
        "ens1f0np0 has no priority with flow control: RoCE loses packets when it is busy;"
        " ens2f0np0 has no priority with flow control: RoCE loses packets when it is busy",
    ),
    "another tool, another priority": (
        (
            without("dcb"),
            both(without("dcb"), answers("mlnx_qos", "-i {netdev}", recorded("pfc/mlnx-qos-priority-5"))),
        ),
        "roce.pfc_ecn",
        "unknown",
        "ens1f0np0: whether it has flow control is not known (dcb is not installed), and no congestion was signalled"
        " yet; ens2f0np0: whether it has flow control is not known (dcb is not installed), and no congestion was"
        " signalled yet",
    ),
    "MTU not followed": (
        (devinfo("1024 (3)"),),
        "rdma.mtu",
        "warn",
        "ens1f0np0 sends RDMA packets of 1024 bytes, its interface's MTU 9000 has room for 4096;"
        " ens2f0np0 sends RDMA packets of 1024 bytes, its interface's MTU 9000 has room for 4096",
    ),
}


@pytest.mark.parametrize("name", INFINIBAND)
def test_infiniband(tmp_path: Path, name: str) -> None:
    changes, check, state, says = INFINIBAND[name]
    assert ill(findings(tmp_path, "infiniband", *changes)) == {check: (state, says)}


@pytest.mark.parametrize("name", ROCE)
def test_roce(tmp_path: Path, name: str) -> None:
    changes, check, state, says = ROCE[name]
    assert ill(findings(tmp_path, "roce", *changes)) == {check: (state, says)}


def test_one_host_that_may_ask_is_enough(tmp_path: Path) -> None:
    nobody = both(refusing("sminfo", NO_UMAD), refusing("saquery", NO_SA))
    assert ill(findings(tmp_path, "infiniband", nobody)) == {}


@pytest.mark.parametrize("fabric", ["infiniband", "roce"])
def test_hosts_without_any_of_it_are_unknown_and_nothing_is_invented(tmp_path: Path, fabric: str) -> None:
    found = findings(tmp_path, fabric, dressed=False)
    assert {f.state for f in found} <= {"ok", "unknown"}
    unknown = {f.check for f in found if f.state == "unknown"}
    wanted = {"infiniband": {"rdma.sm", "rdma.pkey", "rdma.credits"}, "roce": {"roce.pfc_ecn"}}
    assert unknown == wanted[fabric]


def test_counters_are_read_twice_around_an_interval(tmp_path: Path) -> None:
    """The tool that is asked after the files writes what they hold at the second reading."""

    def change(dress: Dress, costume: Costume) -> None:
        folder, state = port_folder(dress, costume, 0), dress.tools / "calls"
        write(folder, "hw_counters/np_cnp_sent", 5)
        write(folder, "counters/symbol_error", 0)
        lines = [
            "#!/bin/sh",
            "PATH=/usr/bin:/bin",
            f"echo x >> {state}",
            f"echo 9000 > {folder}/hw_counters/np_cnp_sent",
        ]
        lines += [f"echo 7 > {folder}/counters/symbol_error", f"echo '  rx_prio3_pause:' $(wc -l < {state})000"]
        (dress.tools / "ethtool").write_text("\n".join([*lines, ""]))

    found = {f.check: f for f in findings(tmp_path, "roce", change) if f.host == "node1"}
    assert found["rdma.counters"].state == "fail"
    assert "symbol_error +7" in found["rdma.counters"].reason
    assert found["roce.pfc_ecn"].state == "warn"
    assert "np_cnp_sent +8995" in found["roce.pfc_ecn"].reason
    assert "rx_prio3_pause +" in found["roce.pfc_ecn"].reason


def test_a_host_without_rdma_waits_for_nothing(tmp_path: Path) -> None:
    costume = Costume(gpus=0, nics=1, fabric="ethernet", tool_delay_s=0)
    dress = dress_host(tmp_path, costume)
    options = Options(root=str(dress.root), path=str(dress.tools), thorough=True, again_s=600.0, deadline_s=20.0)
    raw = load(program.collect(request(options)))
    assert "counters_s" not in raw.values
    assert raw.problems == ()
    assert not [name for name in raw.tools if name.startswith(("sminfo", "saquery", "dcb", "mlnx_qos"))]


@pytest.mark.parametrize(
    ("fabric", "asked"),
    [
        ("infiniband", {"sminfo mlx5_0 1", "saquery mlx5_0 1"}),
        ("roce", {"dcb ens1f0np0"}),
    ],
)
def test_tools_are_asked_about_the_ports_they_know_and_empty_keys_are_left_there(
    tmp_path: Path, fabric: str, asked: set[str]
) -> None:
    costume = Costume(gpus=0, nics=1, fabric=fabric, tool_delay_s=0)  # type: ignore[arg-type]
    dress = dress_host(tmp_path, costume)
    dress_fabric(dress, costume)
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools), thorough=True))))
    assert {name for name in raw.tools if name.startswith(("sminfo", "saquery", "dcb", "mlnx_qos"))} == asked
    assert [path.rpartition("/")[2] for path in raw.files if "/pkeys/" in path] == ["0"]


def test_below_a_bond_both_interfaces_stand_for_the_port() -> None:
    base = "/sys/class/infiniband/mlx5_bond_0"
    statistics = {f"ethtool p{i}": [f"rx_prio3_pause: {i}", f"rx_prio3_pause: {i + 10}"] for i in (0, 1)}
    raw = Raw(
        1,
        listings={base + "/device/net": ("p0", "p1")},
        tools={"dcb p1": ToolOutput(stdout=recorded("pfc/dcb-first-four"))},
        values={"counters": statistics, "counters_s": 2.0},
    )
    port = NicFacts("bond0", "bond0", "mlx5_bond_0", 1, "ethernet", "active")
    found = with_fabric(raw, port, {})
    assert found.growing == {"rx_prio3_pause": 20}
    assert (found.fabric.pfc, found.fabric.watched_s) == ((0, 1, 2, 3), 2.0)


def test_an_interfaces_own_statistics_stand_for_the_port(tmp_path: Path) -> None:
    costume = Costume(gpus=0, nics=1, fabric="roce", tool_delay_s=0)
    dress = dress_host(tmp_path, costume)
    answers("ethtool", "-S {netdev}", recorded("ethtool/connectx4-lx-storm"))(dress, costume)
    options = Options(root=str(dress.root), path=str(dress.tools), thorough=True, again_s=0.01)
    [port, *_] = parse(load(program.collect(request(options)))).nics
    assert port.counters["tx_global_pause"] == 1266552
    assert port.growing == {}
    assert port.fabric.watched_s is not None
