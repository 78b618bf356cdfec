"""Decides at the arrival of an instance whether it is queued, by what waits and by the workers."""

from inferpool.service.errors import OverloadedError, TooLargeError, UnavailableError
from inferpool.service.queue.admission import Admission
from inferpool.service.queue.batcher import Batcher
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.lanes import Lanes
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemRef

_BACKGROUND_SHARE = 0.5
"""Work in the background is refused while more of the arena than this is taken."""


class Entrance:
    """Asks the admission about each instance, with what it needs to know."""

    def __init__(
        self, admission: Admission, queue: Batcher[Instance], lanes: Lanes, arena: Arena
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._lanes = lanes
        self._arena = arena

    def check(self, ref: ItemRef, now: float) -> None:
        """Refuse an instance that the queue has no room or no time for.

        Raises:
            OverShareError: Its key has its share of the queue.
            OverloadedError: The queue is full, or the deadline cannot be met.
            UnavailableError: The service is draining.
        """
        admission, queue, lanes = self._admission, self._queue, self._lanes
        num_queued = queue.num_waiting
        left_s = ref.deadline - now
        num_workers = len(lanes.open) or 1
        # If there are several kinds, all that wait may be of this one's. Its kind may take half of
        # the time until its deadline, so each counts twice.
        num_counted = 2 * num_queued if queue.is_mixed else num_queued
        if num_queued and ref.caller:  # in the same way, all may be of this one's key
            num_counted = max(num_counted, int((num_queued + 1) * admission.key_share.weight))
        if admission.is_welcome(num_counted, num_counted + lanes.num_sent, num_workers, left_s):
            return
        admission.check(num_queued, num_workers, left_s)
        position = queue.position(ref.priority, ref.deadline, now, ref.caller)
        admission.check_share(position, num_queued, num_workers)
        admission.check_time(position, lanes.free_in(now), num_workers, left_s, now)

    def check_background(self, ref: ItemRef) -> None:
        """Refuse an instance of the background that would leave others too little memory.

        Raises:
            TooLargeError: There will never be room for it.
            OverloadedError: There is no room for it now.
            UnavailableError: The service is draining.
        """
        if self._admission.is_draining:
            raise UnavailableError("this server is shutting down", retry_after_s=1)
        arena = self._arena
        most = int(_BACKGROUND_SHARE * arena.num_bytes)
        if ref.num_bytes > most:
            raise TooLargeError(
                f"an instance of a job may have {most:,} bytes here, which is half of arena_bytes"
            )
        if arena.used_bytes + ref.num_bytes > most:
            raise OverloadedError("the arena has little room left", retry_after_s=1)
