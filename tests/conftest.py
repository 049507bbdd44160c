"""Settings for all tests: hypothesis judges what comes out, never how long a busy machine took."""

from hypothesis import HealthCheck, settings

settings.register_profile("hetctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hetctl")
