"""Many hosts need more open files than a process has at first; where that is not allowed, nothing is started."""

from __future__ import annotations

import resource

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.agent.store import check_open_files
from hetctl.launcher.hosts.open_files import allow_open_files

Limits = tuple[int, int]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits that a process has; the last one holds."""
    held = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: held.append(both))
    return held


def test_a_thousand_hosts_raise_what_a_process_may_open(limits: list[Limits]) -> None:
    limits.append((1024, 1 << 20))
    allow_open_files(1000)
    assert limits[-1][0] > 8000
    allow_open_files(16)
    assert limits[-1][0] > 8000  # never less than before


def test_a_limit_that_cannot_be_raised_is_said_with_what_would_do(limits: list[Limits]) -> None:
    with pytest.raises(ConfigError, match=r"1000 hosts need 8,256 open files here, and 4,096 are allowed") as caught:
        allow_open_files(1000)
    assert "ulimit -Hn 8256" in caught.value.hint
    assert limits == [(1024, 4096)]


def test_a_store_for_more_ranks_than_its_host_allows_is_refused(limits: list[Limits]) -> None:
    check_open_files(1000)
    with pytest.raises(OSError, match=r"store of 10,000 ranks needs 20,256 open files, and 4,096 are allowed"):
        check_open_files(10_000)
    limits.append((1024, resource.RLIM_INFINITY))
    check_open_files(10_000)
