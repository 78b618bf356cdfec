"""Decides when a worker gets a canary, and how long that may take. The caller has the clock.

A canary is a batch without items: the worker computes a sample of its model. It passes through the
inbox, the preparation, the model and the outbox like any batch, so an answer proves that they work.
"""

from inferpool.workers.shared.messages import BatchDone, ItemError

_MAX_SHARE = 0.02
"""Largest share of a worker's time that canaries may take."""
_SLOWER = 20.0
"""Factor by which a canary may take longer than the one before, since hosts get busy."""
_MAX_FAILURES = 2


class Canary:
    """Results of the canaries of one incarnation."""

    def __init__(self, batch_timeout_s: float, *, every_s: float, patience_s: float) -> None:
        """Expect the first canary.

        Args:
            batch_timeout_s: Seconds that a batch may take.
            every_s: Seconds between a good answer and the next canary, at least.
            patience_s: Seconds that a quick canary may take.
        """
        self._batch_timeout_s = batch_timeout_s
        self._least_every_s = every_s
        self._patience_s = patience_s
        self._num_failures = 0
        self.every_s = every_s
        """Seconds between a good answer and the next canary."""
        self.limit_s = batch_timeout_s
        """Seconds that the next canary may take; the first may take as long as a batch."""
        self.failure = ""
        """Error of the last canary that failed."""

    @property
    def is_ill(self) -> bool:
        """True if several in a row have failed: a new incarnation may do better."""
        return self._num_failures >= _MAX_FAILURES

    def note(self, done: BatchDone) -> bool:
        """Take the answer to a canary into account; return True if it is a good one."""
        took_s = done.prepare_s + done.compute_s
        self.limit_s = min(self._batch_timeout_s, max(self._patience_s, took_s * _SLOWER))
        self.every_s = max(self._least_every_s, took_s / _MAX_SHARE)
        errors = [outcome for outcome in done.outcomes if isinstance(outcome, ItemError)]
        if not errors:
            self.forget_failures()
            return True
        self._num_failures += 1
        self.failure = errors[0].message
        return False

    def forget_failures(self) -> None:
        """Count failures anew, after a good answer to a batch or a canary."""
        self._num_failures, self.failure = 0, ""
