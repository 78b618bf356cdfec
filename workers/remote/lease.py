"""Says whether the other side of a connection still counts as alive. The caller has the clock."""

BEAT_S = 0.5
"""Seconds between signs of life."""
LEASE_S = 3.0
"""Seconds without any sign of life after which the other side counts as lost."""
_LEAST_LOOK_S = 0.02
_PAUSE_S = 0.5
"""Delay of a look that only a pause of this process itself explains."""


class Lease:
    """The time that the other side has left, which each message from it renews."""

    def __init__(self, now: float, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._heard_at = self._look_due = now

    def renew(self, now: float) -> None:
        """Record a sign of life from the other side, at that time."""
        self._heard_at = max(self._heard_at, now)

    def age_s(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return max(0.0, now - self._heard_at)

    def look(self, now: float, heard_at: float) -> float:
        """Return the seconds until the next look; 0.0 once the other side counts as lost.

        Args:
            now: Monotonic seconds.
            heard_at: Time of its last sign of life.
        """
        self.renew(heard_at)
        look_in_s = self.look_in_s(now)
        return 0.0 if self.is_out(now, look_in_s) else look_in_s

    def look_in_s(self, now: float) -> float:
        """Return the seconds until the next look: a beat, or until the lease may be out."""
        return min(BEAT_S, max(_LEAST_LOOK_S, self._lease_s - self.age_s(now) + _LEAST_LOOK_S))

    def is_out(self, now: float, next_look_s: float) -> bool:
        """Return whether the other side counts as lost. A pause of our own does not count.

        Args:
            now: Monotonic seconds.
            next_look_s: Seconds until this is called again.
        """
        late_s = now - self._look_due
        if late_s > _PAUSE_S:
            self._heard_at = min(now, self._heard_at + late_s)
        self._look_due = now + next_look_s
        return self.age_s(now) > self._lease_s
