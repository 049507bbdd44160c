"""The pair of machines, booted once for all tests here; none of these runs unless `make test-rdma` asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.comm.bridge.engines.shared import ENGINES, installed
from hetctl.comm.contract.cluster import Cluster
from tests.rdma.cluster import two_islands
from tests.rdma.vms import Pair, pair, unavailable

WANTED = "HETCTL_RDMA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = "two virtual machines: make test-rdma" if not os.environ.get(WANTED) else unavailable()
    for item in items:
        if why and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def machines() -> Iterator[Pair]:
    with pair() as running:
        yield running


@pytest.fixture(scope="session")
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
