"""The pair of machines, booted once for all tests here; none of these runs unless `make test-rdma` asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
