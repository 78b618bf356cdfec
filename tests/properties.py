"""Settings for hypothesis: an example may take long, since the machine may stand still."""

import functools

from hypothesis import HealthCheck, settings

untimed = functools.partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])
