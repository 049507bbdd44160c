"""The doctor over real RDMA devices: what `hetctl discover`'s probe reads in two machines, healthy and with faults."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rdma.cluster import hetctl, inventory_file
from tests.rdma.vms import Machine, Pair

pytestmark = pytest.mark.timeout(900)
THEMES = "net,rdma,roce"


def examine(machines: Pair, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of `hetctl doctor` over both machines."""
    done = hetctl(machines, "doctor", "-i", str(inventory_file(machines)), "--json", "--timeout", "240", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def failed(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(f["check"], f["host"]) for f in findings if f["state"] == "fail"]


@contextlib.contextmanager
def pulled_cable(machine: Machine) -> Iterator[None]:
    machine.plug(1, on=False)
    yield
    machine.plug(1, on=True)
    machine.run("until grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state; do sleep 0.2; done")


@contextlib.contextmanager
def no_address(machine: Machine) -> Iterator[None]:
    """The port keeps its link-local GID, as on a host where the address was forgotten."""
    machine.run("ip -4 addr flush dev eth1")
    yield
    machine.run(f"ip addr add {machine.address(1)}/24 dev eth1")


@contextlib.contextmanager
def small_mtu(machine: Machine) -> Iterator[None]:
    machine.run("ip link set eth1 mtu 1500")
    yield
    machine.run("ip link set eth1 mtu 4200")


@contextlib.contextmanager
def no_provider(machine: Machine) -> Iterator[None]:
    """Nothing loads the device's provider any more: libibverbs finds no device."""
    machine.run("mv /etc/libibverbs.d/rxe.driver /etc/libibverbs.d/siw.driver /tmp/")
    yield
    machine.run("mv /tmp/rxe.driver /tmp/siw.driver /etc/libibverbs.d/")


def test_healthy_machines_have_no_failure_of_any_theme(machines: Pair) -> None:
    code, findings = examine(machines)
    assert (code, failed(findings)) == (0, [])
    states = {(f["check"], f["host"]): f["state"] for f in findings}
    for check in ("rdma.port_state", "rdma.gid", "rdma.rate", "rdma.counters", "rdma.libs", "net.mtu"):
        assert [states[check, host] for host in ("rig1", "rig2")] == ["ok", "ok"], check
    assert len([f for f in findings if f["reason"] == "2 ports up"]) == 2  # it did see the devices


@pytest.mark.parametrize(
    ("fault", "check"), [(pulled_cable, "rdma.port_state"), (no_address, "rdma.gid"), (small_mtu, "net.mtu")]
)
def test_each_fault_fails_its_own_check_and_no_other(machines: Pair, fault: Any, check: str) -> None:
    ill = machines.machines[0]
    with fault(ill):
        code, findings = examine(machines, "--only", THEMES)
    assert (code, failed(findings)) == (1, [(check, ill.name)])
    found = next(f for f in findings if f["state"] == "fail")
    assert "eth1" in found["reason"]
    assert found["fix"], "a line to paste"


def test_a_device_without_its_library_is_named(machines: Pair) -> None:
    ill = machines.machines[1]
    with no_provider(ill):
        _, findings = examine(machines, "--only", "rdma")
    assert failed(findings) == []
    assert [f["host"] for f in findings if (f["check"], f["state"]) == ("rdma.libs", "warn")] == [ill.name]


def test_they_are_healthy_again(machines: Pair) -> None:
    code, findings = examine(machines, "--only", THEMES)
    assert (code, failed(findings)) == (0, [])
