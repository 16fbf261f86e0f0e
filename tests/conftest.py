"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Two noisy cores: time says nothing about an example, and a failure must come again.
settings.register_profile("lowtide", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lowtide")
