"""What engines are told in their environment, what their own accounts say, and what ports counted."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.bridge.engines import mooncake, nixl
from hetctl.comm.bridge.engines.base import Wire, Wires
from hetctl.comm.bridge.engines.counters import is_down, port_counters
from hetctl.comm.bridge.engines.nixl import parse_protocols

TWO = Wires((Wire("mlx5_0:1", 3, "a"), Wire("mlx5_3:1", 3, "b")), "10.0.0.1")
MIXED = Wires((Wire("a:1", 1), Wire("b:1", 3)))
TABLES = """\
[1.5] [h:1:0]      ucp_worker.c:1997 UCX  INFO    me inter-node cfg#1 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_3:1)
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   | me inter-node cfg#1                                               |
[1.5] [h:1:0]   | remote memory read by ucp_get*(multi) into host memory from host  |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   | Count | Range  |    Description     |           Config            |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   |     0 | 0..inf | software emulation | tcp/lo                      |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   | me inter-node cfg#1                                               |
[1.5] [h:1:0]   | active message by ucp_am_send* from host memory                   |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   |    12 | 0..2K  | copy-in            | rc_mlx5/mlx5_0:1            |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   | me inter-node cfg#1                                               |
[1.5] [h:1:0]   | remote memory write by ucp_put*(multi) from host memory to host   |
[1.5] [h:1:0]   +-------+--------+--------------------+-----------------------------+
[1.5] [h:1:0]   |     6 | 9K.inf | zero-copy          | 50% on rc_mlx5/mlx5_0:1 and |
"""


def test_only_remote_accesses_that_happened_are_counted() -> None:
    assert parse_protocols(TABLES) == ["zero-copy 50% on rc_mlx5/mlx5_0:1 and"]
    assert parse_protocols("") == []


def test_ucx_gets_the_wires_and_nothing_else() -> None:
    told = nixl.settings(TWO, Path("/tmp/x"))
    assert not {"tcp", "sm", "cuda_copy"} & set(told["UCX_TLS"].split(","))  # nothing that could stage
    own = [nixl.port_settings(one)["engine_config"] for one in (*TWO.each(), *MIXED.each())]
    assert own[:2] == ["NET_DEVICES=mlx5_0:1,IB_GID_INDEX=3", "NET_DEVICES=mlx5_3:1,IB_GID_INDEX=3"]
    assert own[2:] == ["NET_DEVICES=a:1,IB_GID_INDEX=1", "NET_DEVICES=b:1,IB_GID_INDEX=3"]
    assert nixl.port_settings(Wires((Wire("sockets0"),), sockets=True)) == {}


def test_mooncake_is_told_a_gid_index_only_where_it_is_right_for_all_ports() -> None:
    assert [mooncake.settings(one)["MC_GID_INDEX"] for one in TWO.each()] == ["3", "3"]
    assert not any("MC_GID_INDEX" in mooncake.settings(one) for one in MIXED.each())


def test_what_is_left_without_some_ports() -> None:
    assert TWO.without(["mlx5_0:1"]) == Wires((Wire("mlx5_3:1", 3, "b"),), "10.0.0.1")
    assert TWO.without([]) == TWO


def test_counters_of_hardware_and_software_ports(tmp_path: Path) -> None:
    for port, file, value in (("rxe0", "hw_counters/sent_pkts", 7), ("mlx5_0", "counters/port_xmit_data", 9)):
        path = tmp_path / port / "ports" / "1" / file
        path.parent.mkdir(parents=True)
        path.write_text(f"{value}\n")
    found = port_counters(("rxe0:1", "mlx5_0:1", "gone:1"), tmp_path)
    assert found == {"rxe0:1": {"sent_pkts": 7}, "mlx5_0:1": {"port_xmit_data": 9}, "gone:1": {}}


def test_a_port_is_down_only_when_it_says_so(tmp_path: Path) -> None:
    for port, state in (("up", "4: ACTIVE\n"), ("ill", "1: DOWN\n")):
        (tmp_path / port / "ports" / "1").mkdir(parents=True)
        (tmp_path / port / "ports" / "1" / "state").write_text(state)
    assert [is_down(f"{port}:1", tmp_path) for port in ("up", "ill", "gone")] == [False, True, False]
