"""`het` over host-memory RDMA between two machines: every engine, one rail and two, through the real launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.cluster import Cluster
from hetctl.comm.engines.shared import ENGINES, installed
from tests.rdma.cluster import hetctl_started, save, two_islands
from tests.rdma.vms import Pair

pytestmark = pytest.mark.timeout(1500)
PROGRAMS = Path(__file__).parent / "programs"
PAYLOAD = 9 << 20  # at least so many bytes leave each rank


@pytest.fixture(scope="module")
def cluster(machines: Pair) -> Cluster:
    return two_islands(machines)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if not installed(request.param):
        pytest.skip(
            f"{request.param} is not installed, so it is not in the machines: pip install hetctl[{request.param}]"
        )
    name: str = request.param
    return name


def run(
    machines: Pair, file: Path, program: str, *, word: str = "", then: Callable[[], None] = lambda: None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, summary, and what was printed; `then` is done when a line with `word` was."""
    folder = machines.home / f"run-{len(list(machines.home.glob('run-*')))}"
    argv = ["run", "--cluster", str(file), "--run-dir", str(folder), "--verify-bridge", "--bridge", "rdma"]
    said, waiting = [], bool(word)
    with hetctl_started(machines, *argv, "--", "python", str(PROGRAMS / program)) as running:
        assert running.stdout
        for line in running.stdout:
            said.append(line)
            if waiting and word in line:
                waiting = False
                then()
    summary = folder / "summary.json"
    return running.returncode, json.loads(summary.read_text()) if summary.exists() else {}, "".join(said)


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
        assert len(packets) == rails
        assert list(one["rails"]) == list(packets)
        assert one["lost"] == {}
        assert sum(packets.values()) * 4096 > PAYLOAD
        assert all(count * 4096 > PAYLOAD / 10 for count in packets.values()), packets


def test_a_port_that_is_lost_is_named_and_the_other_one_goes_on(machines: Pair, cluster: Cluster, engine: str) -> None:
    file = save(machines, cluster, rails=2, env={"HETCTL_ENGINE": engine})
    ill = machines.machines[0]
    try:
        code, summary, said = run(
            machines, file, "losing.py", word="round 2 is over", then=lambda: ill.plug(1, on=False)
        )
    finally:
        ill.plug(1, on=True)
        ill.run("until grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state; do sleep 0.2; done")
    assert code == 0, said
    assert said.count("all as it should be") == 2
    assert "without rxe1:1: " in said
    for one in summary["bridges"]:
        assert list(one["lost"]) == ["rxe1:1"]
        assert one["registered"] == 0
        assert one["rails"]["rxe0:1"]["written_bytes"] > one["rails"]["rxe1:1"]["written_bytes"]
