"""A rank that is killed while messages are on their way to it over RDMA."""

from __future__ import annotations

import re

import pytest

from hetctl.comm.contract.cluster import Cluster
from tests.rdma.cluster import run, save
from tests.rdma.vms import Pair

pytestmark = pytest.mark.timeout(1500)


def test_a_killed_peer_is_named_in_time_and_nothing_stays_registered(
    machines: Pair, cluster: Cluster, engine: str
) -> None:
    file = save(machines, cluster, rails=1, env={"HETCTL_ENGINE": engine})
    code, _, said = run(machines, file, "bereaved.py")
    assert code == 1, said
    assert "rank 1 on rig2 failed first: it was ended by SIGKILL" in said, said
    told = re.search(r"told after (\d+) s: (send to rank 1 on rig2 failed.*)", said)
    assert told, said
    print(told[0])
    assert int(told[1]) < 30, said
    assert "kept 0 of " in said, said
    for machine in machines.machines:
        left = machine.run("rdma resource show mr | grep -c python || true").stdout
        assert left.strip() == b"0", left
