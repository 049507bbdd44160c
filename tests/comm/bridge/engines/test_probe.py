"""The ports that a rank is given, and what becomes of those that fail their try."""

from __future__ import annotations

import pytest

from hetctl.comm.bridge.engines.base import Wire, Wires
from hetctl.comm.bridge.engines.probe import _summary
from hetctl.comm.bridge.engines.shared import wires_here
from hetctl.comm.contract.errors import ConfigError


def test_ports_come_with_their_gid_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETCTL_RDMA", "rxe0:1=1@roce0,mlx5_0:1@ib0,mlx5_1:2=3")
    wires, _ = wires_here()
    assert wires == Wires((Wire("rxe0:1", 1, "roce0"), Wire("mlx5_0:1", None, "ib0"), Wire("mlx5_1:2", 3)))
    assert [one.name for one in wires.each()] == ["rxe0:1", "mlx5_0:1", "mlx5_1:2"]
    monkeypatch.setenv("HETCTL_RDMA", "sockets,sockets")
    wires, _ = wires_here()
    assert wires is not None
    assert wires.sockets
    assert len(wires.each()) == 2


@pytest.mark.parametrize("text", ["rxe0:1=x", "=1", "rxe0:1,rxe0:1", "rxe0:1,,rxe1:1"])
def test_what_is_no_list_of_ports_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HETCTL_RDMA", text)
    with pytest.raises(ConfigError, match="is no list of RDMA ports"):
        wires_here()


def test_a_port_that_fails_is_lost_unless_it_is_the_last() -> None:
    good, ill, host_only = ("", ""), ("it is down", "it is down"), ("", "no dma-buf")
    assert _summary({"a": good, "b": ill}) == {"host": "", "device": "", "lost": {"b": "it is down"}}
    assert _summary({"a": ill, "b": ill}) == {"host": "it is down", "device": "it is down", "lost": {}}
    assert _summary({"a": good, "b": host_only}) == {"host": "", "device": "no dma-buf", "lost": {}}
