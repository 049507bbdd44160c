"""`het` over host-memory RDMA between two machines: every engine, one rail and two, through the real launcher."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.cluster import Cluster
from tests.rdma.cluster import run, save
from tests.rdma.vms import Pair

pytestmark = pytest.mark.timeout(1500)
PAYLOAD = 9 << 20  # at least so many bytes leave each rank


def test_discovery_calls_the_pair_usable_over_rdma(cluster: Cluster) -> None:
    (link,) = cluster.links
    ways = {way.kind: way for way in link.transports}
    assert ways["rdma"].usable, ways["rdma"].reason
    assert "roce0, roce1" in ways["rdma"].reason
    assert not ways["direct"].usable


@pytest.mark.parametrize("rails", [1, 2])
def test_messages_and_sums_take_the_rails_and_nothing_else(
    machines: Pair, cluster: Cluster, engine: str, rails: int
) -> None:
    file = save(machines, cluster, rails=rails, env={"HETCTL_ENGINE": engine})
    code, summary, said = run(machines, file, "exchange.py")
    assert code == 0, said
    assert said.count("all as it should be") == 2
    assert [one["rank"] for one in summary["bridges"]] == [0, 1]
    for one in summary["bridges"]:
        assert (one["engine"], one["ways"], one["registered"]) == (engine, ["rdma"], 0)
        assert one["sent_bytes"] >= PAYLOAD
        assert all("rxe" in way and "tcp" not in way for way in one["transports"]), one["transports"]
        assert one["transports"]
        assert one["buffered_by_engine"] is not True
        packets = {port: after["sent_pkts"][1] - after["sent_pkts"][0] for port, after in one["port_counters"].items()}
        print(f"{engine}, rank {one['rank']}: {packets} packets sent, {one['rails']}, {one['transports']}")
        assert len(packets) == rails
        assert list(one["rails"]) == list(packets)
        assert one["lost"] == {}
        assert sum(packets.values()) * 4096 > PAYLOAD
        assert all(count * 4096 > PAYLOAD / 10 for count in packets.values()), packets
