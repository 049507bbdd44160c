"""Settings for all tests: hypothesis judges what comes out, never how long a busy machine took; no test's run is noted
in the home of whoever runs the tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("hetctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hetctl")


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
