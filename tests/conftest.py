"""Settings for all tests: hypothesis judges what comes out, never how long a busy machine took; no test's run is noted
in the home of whoever runs the tests; what was skipped is said once, with how to get it."""

import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("hetctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hetctl")


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests run side by side, as many as cores and more: threads of torch would wait for each other by spinning."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


# Rooms whose files take longest, longest first
LONG = (
    "trainer/loop",  # one file of layouts takes longest of all
    "hetctl/runs",
    "hetctl/validate",
    "hetctl/bench",
    "hetctl/",
    "trainer",
)


BEGUN, TESTS = time.monotonic(), Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin none after these, and other files first at each commit")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGUN > 60 * minutes:
        pytest.skip("the minutes it was given are over: make test-slow runs all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long is begun first, and what is short fills the end: no core waits for a last long file. Where time
    ends first, each commit has an order of its own, so that all have their turn."""
    items.sort(key=_long_first if config.getoption("minutes") is None else partial(_drawn, _commit()))


def _long_first(item: pytest.Item) -> int:
    return next((number for number, name in enumerate(LONG) if _file(item).startswith(name)), len(LONG))


def _drawn(commit: str, item: pytest.Item) -> str:
    return hashlib.sha256(f"{commit} {_file(item)}".encode()).hexdigest()


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=TESTS, text=True, capture_output=True, check=False).stdout


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three a core: more than half of the tests' time is spent waiting. Each may hold a GiB. Of slow ones, which start
    many processes each, half as many keep all cores busy, and none waits for its deadline."""
    each = 1.5 if config.option.markexpr == "slow" else 3
    return min(int(each * len(os.sched_getaffinity(0))), 16)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason why tests were skipped: reasons name what is missing, and how to get it."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count} test{'s' * (count > 1)} skipped: {reason}", yellow=True)
