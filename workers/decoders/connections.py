"""One batch at the decoders of a worker, and the state of each decoder. Worker processes.

The thread that prepares batches uses them; see `workers.decoders.worker_side`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from inferpool.models.item import Features
from inferpool.workers.decoders.ring import MAX_ANSWER_BYTES, TASKS_AT_ONCE
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome
from inferpool.workers.shared.queues import Frames

Found = Features | bytes | ItemError | None
"""Result of a decoder for an instance; None: the worker has to prepare it itself."""


@dataclass(slots=True)
class MoreWork:
    """Source of the next batches, for times when decoders have nothing to do."""

    fd: int
    """Descriptor that can be read when a batch may have arrived."""
    begin: Callable[[], bool]
    """Begins with a batch if one has arrived, and returns whether one has."""
    is_over: bool = False
    """True once none will come any more."""


class Decoding:
    """The part of one batch that decoders prepare, in a run of slots."""

    def __init__(
        self,
        refs: Sequence[ItemRef],
        given: Sequence[int],
        run: range,
        finish: "Callable[[Decoding, MoreWork | None], None]",
        release: "Callable[[Decoding], None]",
    ) -> None:
        """Record which instances of a batch go to decoders, by index."""
        self.refs = refs
        self.run = run
        self.found: dict[int, Found] = {}
        self.others = [i for i in range(len(refs)) if i not in set(given)]
        """Instances that the worker prepares itself."""
        self.num_writers = 0
        """Instances with slots that a decoder may still write to."""
        self._readers: Sequence[Callable[[], bool]] = ()
        self._given = given
        self._finish = finish
        self._release = release

    @property
    def is_free(self) -> bool:
        """True if no decoder may write to its slots any more, and no device reads them."""
        return not self.num_writers and all(is_over() for is_over in self._readers)

    @property
    def is_done(self) -> bool:
        """True once it is known what became of all that went to decoders."""
        return len(self.found) == len(self._given)

    def finish(self, more: MoreWork | None = None) -> None:
        """Wait until it is done; `more` may begin with other batches meanwhile."""
        self._finish(self, more)

    def store(self, features: list[Features | None], outcomes: list[Outcome | None]) -> list[int]:
        """Store what became of the instances; leave to `others` what decoders could not prepare.

        Returns:
            The instances that are prepared.
        """
        decoded = []
        self.others = []
        for index, found in self.found.items():
            if isinstance(found, bytes | ItemError):
                outcomes[index] = found
            elif found is None:
                self.others.append(index)
            else:
                features[index] = found
                decoded.append(index)
        return decoded

    def release(self, readers: Sequence[Callable[[], bool]] = ()) -> None:
        """Release the slots, since the batch is computed. Any thread may call it.

        Args:
            readers: Each returns whether the device is done with some copies from the slots.
        """
        self._readers = readers
        self._release(self)


@dataclass(slots=True, eq=False)
class DecoderJob:
    """One instance that is waiting for a decoder, or held by one."""

    decoding: Decoding
    index: int
    num_deaths: int = 0
    """Decoders that died while they worked on it."""
    num_unbegun: int = 0
    """Decoders that died with it as their oldest task, and had not said that they had begun it."""


@dataclass(slots=True, eq=False)
class DecoderConnection:
    """One decoder: its pipes, its process, and the tasks that it holds, oldest first."""

    number: int
    pid: int
    tasks_fd: int
    answers_fd: int
    process_fd: int
    frames: Frames = field(default_factory=partial(Frames, MAX_ANSWER_BYTES))
    jobs: dict[int, DecoderJob] = field(default_factory=dict)
    is_ready: bool = False
    due: float = 0.0
    """Time at which its oldest task has taken too long."""
    killed_at: float = 0.0

    @property
    def has_room(self) -> bool:
        """True if it accepts another task now."""
        return self.is_ready and not self.killed_at and len(self.jobs) < TASKS_AT_ONCE

    def kill(self) -> None:
        """Kill it; its tasks are its own until its exit is certain."""
        self.killed_at = self.killed_at or time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process_fd, signal.SIGKILL)

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self.tasks_fd, self.answers_fd, self.process_fd):
            os.close(fd)
