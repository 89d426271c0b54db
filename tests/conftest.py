"""Settings of every tier."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes, or takes to draw, says more of the machine than of the code.
settings.register_profile("rung", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rung")
