"""The seam between the routes of jobs and whoever keeps and computes them."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from inferpool.models.spec import TensorSpec
from inferpool.service.parts.jobs.records import Job, JobAnswer, JobState, NewJob, StoredInstance

Instances = Callable[[], Iterator[StoredInstance]]
"""Begins to read the instances of a body. The reading blocks, so a thread does it."""


class JobsTarget(Protocol):
    """Keeps jobs and answers for them. An owner sees its own jobs only.

    Methods that take the id of a job raise `UnknownJobError` if there is none for its owner.
    """

    async def until_open(self) -> None:
        """Wait a moment for the store to open; each route calls this first.

        Raises:
            UnavailableError: It could not be opened, or the service has not started.
        """

    @property
    def spool_folder(self) -> Path:
        """The folder for bodies on their way, on a disk with room."""

    def model_named(self, name: str | None) -> str:
        """Return the name of a model that is served, or the default one's if None.

        Raises:
            UnknownModelError: There is none.
        """

    def inputs_of(self, model: str) -> Sequence[TensorSpec]:
        """Return the tensors that a model takes; empty if unknown."""

    def check_webhook(self, url: str) -> None:
        """Check that a URL may be called when a job is over.

        Raises:
            InvalidInputError: It is no URL.
            ForbiddenError: Its host is not one of those that the settings allow.
        """

    async def create(self, new: NewJob, instances: Instances) -> tuple[Job, bool]:
        """Keep a job, unless it is kept already; return it, and whether it was created.

        Nothing is left of a job whose instances raise an error.

        Raises:
            ServiceError: It is refused, or its instances cannot be read.
        """

    async def job(self, id: str, owner: str) -> Job:
        """Return a job as it is now."""

    async def until(self, id: str, owner: str, timeout_s: float) -> Job:
        """Wait until a job is over or the time is up, and return it."""

    def watch(self, id: str, owner: str) -> AsyncGenerator[Job, None]:
        """Return a job now and at each change; it ends once the job is over or deleted."""

    async def jobs(
        self, owner: str, states: Sequence[JobState], limit: int, before: str | None
    ) -> Sequence[Job]:
        """Return jobs, the newest first, from the one before the job `before` on."""

    async def cancel(self, id: str, owner: str) -> Job:
        """End a job early, and return it."""

    async def delete(self, id: str, owner: str) -> None:
        """Forget a job that is over."""

    def answers(
        self, id: str, owner: str, first: int, count: int | None
    ) -> AsyncIterator[Sequence[tuple[int, JobAnswer, int]]]:
        """Return known answers in chunks: number of the instance, answer, version of the model.

        They begin with instance `first`, and are of `count` instances, or of all if None.
        """
