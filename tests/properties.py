"""How hypothesis tries its examples here: a pause of the machine makes none of them a failure."""

import functools

from hypothesis import HealthCheck, settings

untimed = functools.partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])
