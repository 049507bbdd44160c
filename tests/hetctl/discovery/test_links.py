"""Measuring links: who is paired with whom, how figures reach the cluster, and a sender that trusts nobody."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from hetctl.comm.contract.cluster import (
    Access,
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Measured,
    Member,
    Nic,
    TransportOption,
    native_way,
)
from hetctl.discovery import links, traffic
from hetctl.discovery.inventory import InventoryHost
from hetctl.discovery.links import (
    RailEnd,
    lanes_between,
    measure_pair,
    pairs_of,
    parse_bandwidth,
    parse_latency,
    perftest_argv,
    rounds,
    with_measured,
)
from hetctl.discovery.unusual import unusual
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import converse
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import ShellError

BANDWIDTH = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    46520            0.00               780.40             0.093031
---------------------------------------------------------------------------------------
"""
LATENCY = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec] 
 64      1000          1.49           7.52         1.53                1.54             0.10
"""


def cluster(left: int = 2, right: int = 3) -> Cluster:
    names = [f"a{i}" for i in range(left)] + [f"b{i}" for i in range(right)]
    hosts = tuple(Host(n, data_address=f"10.0.0.{i}", devices=(Device(0, "cpu", "cpu"),)) for i, n in enumerate(names))
    islands = (
        Island("a", "cpu", "net0", tuple(Member(n, 0) for n in names[:left])),
        Island("b", "cpu", "net0", tuple(Member(n, 0) for n in names[left:])),
    )
    tcp = TransportOption("tcp", True, "believed", 5e9)
    ways = (tcp, TransportOption("shm", False, "no"), native_way(*islands, tcp))
    return Cluster(hosts, islands, links=(IslandLink(("a", "b"), ways),))


def test_every_host_is_measured_with_a_partner_and_a_neighbour() -> None:
    pairs = pairs_of(cluster(), ["a0", "a1", "b0", "b1", "b2"])
    assert pairs == [("a0", "b0"), ("a1", "b1"), ("a0", "b2"), ("a0", "a1"), ("b0", "b1"), ("b1", "b2"), ("b2", "b0")]
    assert pairs_of(cluster(), ["a0", "b0"]) == [("a0", "b0")]
    assert pairs_of(cluster(1, 1), ["a0"]) == []


def test_no_host_takes_part_twice_in_a_turn() -> None:
    pairs = pairs_of(cluster(5, 8), [f"a{i}" for i in range(5)] + [f"b{i}" for i in range(8)])
    turns = rounds(pairs)
    assert sorted(p for turn in turns for p in turn) == sorted(pairs)
    assert all(len({h for p in turn for h in p}) == 2 * len(turn) for turn in turns)


def test_lanes_are_nics_on_one_network_else_the_data_addresses() -> None:
    nic = Nic("r0", "roce", 1.0, "roce0", "10.1.0.1", "mlx5_0")
    plain = Nic("e0", "ethernet", 1.0, "net0", "10.0.0.1")
    a, b = Host("a", nics=(nic, plain)), Host("b", nics=(nic,))
    [lane] = lanes_between(a, b)
    assert (lane.nics, lane.devices) == (("r0", "r0"), ("mlx5_0", "mlx5_0"))
    far = Host("c", data_address="10.9.0.1")
    assert lanes_between(Host("d", data_address="10.8.0.1"), far)[0].addresses == ("10.8.0.1", "10.9.0.1")
    assert lanes_between(Host("d"), far) == []


def test_measured_figures_replace_believed_ones() -> None:
    rows = [
        Measured(("a0", "b0"), ("e", "e"), "tcp", 20e-6, 1e9),
        Measured(("a1", "b1"), ("x", "x"), "tcp", 30e-6, 1e9),
        Measured(("a1", "b1"), ("y", "y"), "tcp", 30e-6, 1e9),
        Measured(("a1", "b1"), ("*", "*"), "tcp", None, 1.5e9),
        Measured(("b0", "b1"), ("e", "e"), "tcp", 10e-6, 9e9),
    ]
    [link] = with_measured(cluster(), rows).links
    [tcp] = [way for way in link.transports if way.kind == "tcp"]
    assert tcp.measured
    assert tcp.rate_bytes_per_s == pytest.approx(2 * 1.25e9)  # two hosts a side, the middle of 1 and 1.5
    assert tcp.latency_s == pytest.approx(30e-6)
    [native] = [way for way in link.transports if way.kind == "native"]
    assert (native.usable, native.measured, native.rate_bytes_per_s) == (True, True, tcp.rate_bytes_per_s)


def test_a_pair_that_cannot_connect_makes_the_transport_unusable() -> None:
    rows = [Measured(("a0", "b0"), ("e", "e"), "tcp", problem="10.0.0.2: timed out")]
    tcp = next(way for way in with_measured(cluster(), rows).links[0].transports if way.kind == "tcp")
    assert (tcp.usable, tcp.rate_bytes_per_s) == (False, None)
    assert "a0 to b0: 10.0.0.2: timed out" in tcp.reason
    native = next(way for way in with_measured(cluster(), rows).links[0].transports if way.kind == "native")
    assert (native.usable, native.reason) == (False, tcp.reason)


def test_a_slow_rail_is_noticed() -> None:
    rows = [Measured(("a0", f"b{i}"), ("e", "e"), "tcp", None, 1e9 if i else 0.1e9) for i in range(3)]
    [note] = unusual([], with_measured(cluster(), rows))
    assert note.sentence == "a0 - b0 over e-e reached 100.0 MB/s, its like 1.0 GB/s"


def test_what_is_slower_than_its_like_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rail that one busy second slowed is cleared by the second look; one that is slow stays slow."""
    names = [f"a{n}" for n in range(4)]
    busy, slow = ("a0", "a1"), ("a2", "a3")
    looks: dict[tuple[str, str], int] = {}

    def measure_pair(a: links.RailEnd, b: links.RailEnd, **_: object) -> list[Measured]:
        pair = (a.host.name, b.host.name)
        looks[pair] = looks.get(pair, 0) + 1
        rate = 1e8 if pair == slow or (pair == busy and looks[pair] == 1) else 1e9
        return [Measured(pair, ("eth0", "eth0"), "tcp", 1e-5, rate)]

    monkeypatch.setattr(links, "measure_pair", measure_pair)
    monkeypatch.setattr(links.Entrance, "open", lambda self, entry, deadline: LocalShell())
    everyone = Cluster(tuple(Host(name) for name in names), islands=(), links=())
    monkeypatch.setattr(
        links, "pairs_of", lambda cluster, reached: [busy, slow, ("a0", "a2"), ("a1", "a3"), ("a0", "a3")]
    )
    found = links.measure_links(everyone, [InventoryHost(name, Access()) for name in names], timeout_s=5.0)
    assert {row.hosts: row.rate_bytes_per_s for row in found.measured}[busy] == 1e9
    assert [m.hosts for _, _, slow_ones in links.rails_alike(found.measured) for m in slow_ones] == [slow]
    assert (looks[busy], looks[slow], looks["a0", "a2"]) == (2, 2, 1)


def test_perftest_commands_and_tables() -> None:
    assert perftest_argv("ib_write_bw", "mlx5_0", 20000, server="10.0.0.1")[:5] == [
        "ib_write_bw",
        "-d",
        "mlx5_0",
        "-p",
        "20000",
    ]
    assert parse_bandwidth(BANDWIDTH) == pytest.approx(780.4e9 / 16)
    assert parse_latency(LATENCY) == pytest.approx(1.53e-6)
    assert parse_bandwidth("Couldn't connect to 10.0.0.1:20000") is None
    assert parse_latency("") is None
    for name in ("-x", "a b", "$(x)", ""):
        with pytest.raises(ValueError):
            perftest_argv("ib_write_lat", name, 20000)


def test_two_ends_measure_over_loopback() -> None:
    ends = [RailEnd(Host(n, data_address="127.0.0.1"), LocalShell(), sys.executable) for n in "ab"]
    [row] = measure_pair(ends[0], ends[1], seconds=0.1, deadline=Deadline(60))
    assert row.problem is None
    assert row.rate_bytes_per_s is not None
    assert row.rate_bytes_per_s > 1e6
    assert row.latency_s is not None
    assert 0 < row.latency_s < 0.1


def test_a_program_that_dies_says_what_it_said() -> None:
    dialogue = converse(
        LocalShell(), sys.executable, "def main(x): raise SystemExit('bad day')", {}, deadline=Deadline(20)
    )
    with pytest.raises(ShellError) as caught:
        dialogue.receive(deadline=Deadline(20))
    dialogue.close()
    assert "bad day" in caught.value.message


@pytest.fixture
def listener() -> Iterator[tuple[int, bytes]]:
    secret = secrets.token_bytes(32)
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=traffic.accept, args=(server, secret), daemon=True).start()
    yield server.getsockname()[1], secret
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_who_does_not_know_the_secret_is_shown_the_door(listener: tuple[int, bytes]) -> None:
    port, secret = listener
    rail = {"address": "127.0.0.1", "port": port, "source": "127.0.0.1"}
    with pytest.raises((ValueError, OSError)):
        traffic.call(rail, b"wrong" * 5)
    assert traffic.latency(traffic.call(rail, secret)) > 0


def test_a_stranger_gets_a_nonce_and_then_nothing(listener: tuple[int, bytes]) -> None:
    with socket.create_connection(("127.0.0.1", listener[0]), timeout=10) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n" + bytes(64))
        received = b""
        while part := _receive(sock):
            received += part
        assert len(received) == traffic.NONCE + 32  # its nonce and its proof, which is worth nothing without the secret


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


def test_an_echo_of_the_listeners_own_proof_is_no_proof(listener: tuple[int, bytes]) -> None:
    with socket.create_connection(("127.0.0.1", listener[0]), timeout=10) as sock:
        theirs = traffic.read(sock, traffic.NONCE)
        sock.sendall(theirs)
        proof = traffic.read(sock, 32)
        sock.sendall(proof)
        assert _receive(sock) == b""
