"""Which way a pair takes: direct where both ends proved it, else RDMA, else TCP; forced ones or an error; pure."""

from __future__ import annotations

import itertools

import pytest

from hetctl.comm.bridge.engines.base import EngineName
from hetctl.comm.bridge.engines.probe import EngineTrial
from hetctl.comm.bridge.transports import PEER_COPY, Ability, TransportChoice, choose
from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.errors import ConfigError

BOTH: tuple[EngineName, ...] = ("nixl", "mooncake")


def able(name: str, *, host: str = "", device: str = "", only: EngineName | None = None) -> Ability:
    """A rank that can use both engines, but for the reasons given; `only` one engine is there."""
    no = "no such engine here"
    return Ability({e: EngineTrial(host, device) if only in (None, e) else EngineTrial(no, no) for e in BOTH}, name)


def pick(
    a: Ability, b: Ability, planned: TransportKind = "rdma", *, forced: bool = False, on_device: bool = True
) -> TransportChoice:
    return choose(a, b, planned=planned, forced=forced, on_device=on_device, engines=BOTH, pair="a - b")


def test_direct_where_both_ends_registered_device_memory() -> None:
    assert pick(able("x"), able("y")).kind == "direct"
    assert pick(able("x"), able("y"), on_device=False).kind == "rdma"


@pytest.mark.parametrize("ill", [0, 1])
def test_rdma_from_host_memory_where_one_end_did_not(ill: int) -> None:
    ends = [able("x"), able("y")]
    ends[ill] = able("xy"[ill], device="ibv_reg_mr: Bad address")
    found = pick(*ends)
    assert (found.kind, found.engine) == ("rdma", "nixl")


def test_tcp_where_neither_works_and_the_reasons_are_kept() -> None:
    found = pick(able("x", device="no NIC", host="no NIC"), able("y"))
    assert (found.kind, found.engine) == ("tcp", None)
    assert "rdma with mooncake: x: no NIC" in found.reason


def test_the_first_engine_that_both_have() -> None:
    assert pick(able("x"), able("y", only="mooncake")).engine == "mooncake"
    assert pick(able("x", only="nixl"), able("y", only="mooncake")).kind == "tcp"


def test_a_forced_way_is_never_replaced() -> None:
    no_device = able("y", device="Bad address")
    assert pick(able("x"), able("y"), "rdma", forced=True).kind == "rdma"  # though direct would work
    with pytest.raises(ConfigError, match="cannot be direct: direct with nixl: y: Bad address"):
        pick(able("x"), no_device, "direct", forced=True)
    with pytest.raises(ConfigError, match="cannot be rdma"):
        pick(able("x", host="memlock is 8 MiB"), no_device, "rdma", forced=True)


def test_two_devices_of_one_host_are_a_peer_copy_and_only_when_forced() -> None:
    assert pick(able("x"), able("x"), "direct").kind == "shm"
    assert pick(able("x"), able("x"), "direct", forced=True, on_device=False).kind == "shm"
    with pytest.raises(ConfigError, match="cannot be rdma: both ranks are on x"):
        pick(able("x"), able("x"), "rdma", forced=True)
    found = pick(able("x"), able("x"), "direct", forced=True)
    assert (found.kind, found.label) == ("direct", PEER_COPY)
    assert "RDMA" not in found.label.upper()


def test_both_ends_choose_alike() -> None:
    kinds = [able("x"), able("x", device="no"), able("x", host="no", device="no"), able("x", only="nixl")]
    others = [Ability(k.trials, "y") for k in kinds]
    for one, other in itertools.product(kinds, others):
        assert pick(one, other).kind == pick(other, one).kind
