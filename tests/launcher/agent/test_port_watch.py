"""Ports that become worse during a run: the rule, the memory of it, and reading it from a made-up /sys."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from hetctl.comm.contract.events import PortChanged
from hetctl.launcher.agent import port_watch
from hetctl.launcher.agent.orders import WatchedPort
from hetctl.launcher.agent.port_watch import QUIET_S, PortHistory, PortState, PortWatch, read_port, rose, worse

FAST = PortState(True, "ACTIVE", 400e9, {"symbol_error": 7, "link_downed": 1, "carrier_changes": 2})


def port(**changes: Any) -> PortState:
    about = {"up": True, "state": "ACTIVE", "bits_per_s": 400e9, **changes}
    counters = FAST.counters | about.pop("counters", {})
    return PortState(**about, counters=counters)


def test_a_port_that_is_as_it_was_is_well() -> None:
    assert worse(FAST, FAST, port()) == {}


def test_down_and_slower_are_worse_than_at_the_start() -> None:
    assert worse(FAST, FAST, port(up=False, state="DOWN", bits_per_s=10e9)) == {"down": "down (DOWN)"}
    assert worse(FAST, FAST, port(bits_per_s=100e9)) == {"rate": "at 100 Gb/s instead of 400 Gb/s"}


def test_what_was_so_at_the_start_is_not_worse() -> None:
    """A second port that nobody cabled, or a link that trained slowly: the checks before the run speak of those."""
    down = PortState(False, "down")
    assert worse(down, down, down) == {}
    assert worse(port(bits_per_s=100e9), FAST, port()) == {}


def test_unknown_is_neither_well_nor_worse() -> None:
    assert worse(FAST, FAST, PortState(None)) == {}
    assert worse(PortState(None), PortState(None), PortState(True, "up", 1e9, {"rx_errors": 5000})) == {}


def test_many_errors_at_once_count_and_few_only_when_they_go_on() -> None:
    few, more = port(counters={"symbol_error": 10}), port(counters={"symbol_error": 12})
    assert worse(FAST, FAST, few) == {}
    assert worse(FAST, few, more, rising=rose(FAST, few)) == {"symbol_error": "symbol_error rose by 2"}
    assert worse(FAST, FAST, port(counters={"symbol_error": 500})) == {"symbol_error": "symbol_error rose by 493"}


def test_a_flap_and_a_retrained_link_count_at_once() -> None:
    assert set(worse(FAST, FAST, port(counters={"carrier_changes": 4}))) == {"carrier_changes"}
    assert set(worse(FAST, FAST, port(counters={"link_downed": 2}))) == {"link_downed"}


def test_each_change_is_said_once_and_so_is_its_end() -> None:
    past = PortHistory("r0", FAST)
    said = [past.judge(p, at) for at, p in enumerate([port(), port(up=False), port(up=False), port(), port()])]
    assert [event and event.problem for event in said] == [None, "down (ACTIVE)", None, None, None]
    assert [bool(event) for event in said] == [False, True, False, True, False]


def test_errors_are_over_when_none_came_for_a_while() -> None:
    past, flapped = PortHistory("r0", FAST), port(counters={"carrier_changes": 4})
    assert past.judge(flapped, 0.0) is not None
    assert past.judge(flapped, QUIET_S - 1) is None
    over = past.judge(flapped, QUIET_S + 1)
    assert over == PortChanged("r0", None)


def fake_sys(root: Path) -> Path:
    files = {
        "sys/class/net/ib0/operstate": "up\n",
        "sys/class/net/ib0/speed": "400000\n",
        "sys/class/net/ib0/carrier_changes": "3\n",
        "sys/class/net/ib0/statistics/rx_errors": "11\n",
        "sys/class/infiniband/mlx5_0/ports/2/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/2/rate": "200 Gb/sec (4X HDR)\n",
        "sys/class/infiniband/mlx5_0/ports/2/counters/symbol_error": "5\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    root = str(fake_sys(tmp_path))
    counters = {"carrier_changes": 3, "rx_errors": 11}
    assert read_port(WatchedPort("ib0"), root=root) == PortState(True, "up", 400e9, counters)
    assert read_port(WatchedPort("ib0", "mlx5_0", 2), root=root) == PortState(
        True, "ACTIVE", 200e9, counters | {"symbol_error": 5}
    )
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/2/state").write_text("1: DOWN\n")
    (tmp_path / "sys/class/net/ib0/speed").write_text("-1\n")
    assert not read_port(WatchedPort("ib0", "mlx5_0", 2), root=root).up
    assert read_port(WatchedPort("ib0"), root=root).bits_per_s is None
    assert read_port(WatchedPort("nowhere"), root=root) == PortState(False, "gone")


def test_a_watch_says_what_changed_and_what_hangs(monkeypatch: Any) -> None:
    """By events, not by waiting: the reader hands out one state after the other and then hangs."""
    states, hang, seen = iter([FAST, port(up=False)]), threading.Event(), threading.Event()

    def read(_: WatchedPort) -> PortState:
        state = next(states, None)
        if state is None:
            seen.set()
            hang.wait(30)
        return state or FAST

    monkeypatch.setattr(port_watch, "HANGS_S", -1.0)
    watch = PortWatch(every_s=0.001, read=read)
    watch.start([WatchedPort("r1")])
    assert seen.wait(30)
    first, second = watch.look()
    assert first == PortChanged("r1", "down (ACTIVE)")
    assert "has not answered" in second.problem
    assert watch.look() == []
    watch.close()
    hang.set()
