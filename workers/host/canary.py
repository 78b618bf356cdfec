"""When an idle worker must prove itself, and what its answers say. Pure: the caller has the clock.

A canary is a batch without items. It takes the way of every batch, through the inbox, preparation,
the model and the outbox, on a sample of the model's own.
"""

from inferpool.workers.messages import BatchDone, ItemError

EVERY_S = 5.0
"""Without a good answer for this long, a worker is asked for one."""
PATIENCE_S = 5.0
"""What any worker may take to begin with its work, or to answer a quick canary."""
_MAX_SHARE = 0.02
"""Of a worker's time that canaries may take."""
_SLOWER = 20.0
"""A canary may take this many times longer than the one before, on a host that is busy now."""
_MAX_FAILURES = 2


class Canary:
    """What is known of one incarnation by its canaries."""

    def __init__(self, batch_timeout_s: float) -> None:
        self._batch_timeout_s = batch_timeout_s
        self._num_failures = 0
        self.every_s = EVERY_S
        """When the next one is due after a good answer."""
        self.limit_s = batch_timeout_s
        """How long the next one may take. Nothing is known of how long the first does."""
        self.failure = ""
        """What was wrong with the last one."""

    @property
    def is_ill(self) -> bool:
        """Several in a row have failed: a new incarnation may do better."""
        return self._num_failures >= _MAX_FAILURES

    def note(self, done: BatchDone) -> bool:
        """Learn from an answer; whether it is a good one."""
        took_s = done.prepare_s + done.compute_s
        self.limit_s = min(self._batch_timeout_s, max(PATIENCE_S, took_s * _SLOWER))
        self.every_s = max(EVERY_S, took_s / _MAX_SHARE)
        errors = [outcome for outcome in done.outcomes if isinstance(outcome, ItemError)]
        if not errors:
            self.forget_failures()
            return True
        self._num_failures += 1
        self.failure = errors[0].message
        return False

    def forget_failures(self) -> None:
        """It has given a good answer, if not to a canary."""
        self._num_failures, self.failure = 0, ""
