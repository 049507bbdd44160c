"""What engines are told in their environment, what their own accounts say, and what ports counted."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.engines import mooncake, nixl
from hetctl.comm.engines.base import Wires
from hetctl.comm.engines.counters import port_counters
from hetctl.comm.engines.nixl import parse_protocols

TWO = Wires(("mlx5_0:1", "mlx5_3:1"), (3, 3), "10.0.0.1")
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
    assert (told["UCX_NET_DEVICES"], told["UCX_MAX_RMA_RAILS"], told["UCX_IB_GID_INDEX"]) == (
        "mlx5_0:1,mlx5_3:1",
        "2",
        "3",
    )
    assert not {"tcp", "sm", "cuda_copy"} & set(told["UCX_TLS"].split(","))  # nothing that could stage
    mixed = nixl.settings(Wires(("a:1", "b:1"), (1, 3)), Path("/tmp/x"))
    assert "UCX_IB_GID_INDEX" not in mixed  # one value cannot mean both


def test_mooncake_keeps_rails_apart() -> None:
    assert mooncake.settings(TWO)["MC_ENABLE_DEST_DEVICE_AFFINITY"] == "1"
    assert "MC_ENABLE_DEST_DEVICE_AFFINITY" not in mooncake.settings(Wires(("rxe0:1",), (None,)))


def test_counters_of_hardware_and_software_ports(tmp_path: Path) -> None:
    for port, file, value in (("rxe0", "hw_counters/sent_pkts", 7), ("mlx5_0", "counters/port_xmit_data", 9)):
        path = tmp_path / port / "ports" / "1" / file
        path.parent.mkdir(parents=True)
        path.write_text(f"{value}\n")
    found = port_counters(("rxe0:1", "mlx5_0:1", "gone:1"), tmp_path)
    assert found == {"rxe0:1": {"sent_pkts": 7}, "mlx5_0:1": {"port_xmit_data": 9}, "gone:1": {}}
