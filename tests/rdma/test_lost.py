"""A rail of two whose cable is pulled while messages go over both."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.cluster import Cluster
from tests.rdma.cluster import run, save
from tests.rdma.vms import Pair

pytestmark = pytest.mark.timeout(1500)


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
