"""The jobs of a service: makes, shows, ends and computes them. Lives in the event loop."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.models.spec import USUAL_INTERFACE, Interface, TensorSpec
from inferpool.service.errors import (
    ServiceError,
    StartError,
    UnknownJobError,
    UnknownModelError,
)
from inferpool.service.parts.jobs.keeper import StoreKeeper
from inferpool.service.parts.jobs.records import (
    STATES,
    UNFINISHED,
    Job,
    JobAnswer,
    JobProblem,
    JobState,
    NewJob,
    StoreCounts,
    StoredInstance,
    StoreLimits,
)
from inferpool.service.parts.jobs.runner import Runner
from inferpool.service.parts.jobs.threads import in_thread
from inferpool.service.parts.jobs.watches import Watches
from inferpool.service.parts.jobs.webhooks import Webhooks, read_secret
from inferpool.service.queue.pool import Pool
from inferpool.service.queue.shares import Shares
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.distribution import Distribution
from inferpool.service.telemetry.metrics import Reading

if TYPE_CHECKING:
    from inferpool.service.parts.jobs.store.store import JobStore

logger = logging.getLogger(__name__)

_RETRY_S = 10.0
"""When what has failed is tried again."""
_POLL_S = 1.0
"""How often a shared store is asked for the work of others."""
_POLL_ALONE_S = 10.0
_CLEAN_S = 30.0
_COUNT_S = 1.0
_DURATION_EDGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_NUM_WRITERS = 4
_NUM_USES = 4
"""Calls of clients that use the store at once, but for those that bring new jobs."""
_CHUNK = 256
"""Answers that are read in a thread at once."""
Instances = Callable[[], Iterator[StoredInstance]]
"""Begins to read the instances of a body. The reading blocks, so a thread does it."""


class Jobs:
    """The jobs of one service, from start to stop."""

    def __init__(
        self,
        keeper: StoreKeeper,
        pools: Mapping[str, Pool],
        default_model: str,
        webhooks: Webhooks,
    ) -> None:
        """Open nothing yet.

        Args:
            keeper: Opens the store.
            pools: The pools that serve, by model.
            default_model: The model of calls that name none.
            webhooks: Calls webhooks when jobs are over.
        """
        self.keeper = keeper
        """Opens the store, and says whether it can be used."""
        self._pools = pools
        self._default_model = default_model
        self.webhooks = webhooks
        self._is_shared = "://" in keeper.place
        self._runner: Runner | None = None
        self._running: asyncio.Task[None] | None = None
        self._computing: asyncio.Task[None] | None = None
        self._is_ending = False
        # Large bodies take long to write, and must not keep results from being committed.
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="new jobs")
        self._uses = Shares(_NUM_USES, keeper.limits.share, "uses of the store of jobs")
        poll_s = _POLL_S if self._is_shared else _POLL_ALONE_S
        self.watches = Watches(self.job, poll_s=poll_s)
        """The calls that wait for jobs."""
        self._served = set(pools)
        """Models that have been served since the start."""
        self.counts = StoreCounts(jobs={}, num_waiting=0, num_bytes=0)
        """How much the store holds of all services, about a second ago."""
        self._num_free_bytes: int | None = None
        """Room on the disk of the store at that time; None if that is the database's affair."""
        self._num_answered: Counter[tuple[str, str]] = Counter()
        """Instances whose answer was kept, by model and outcome."""
        self._num_ended = dict.fromkeys(STATES[len(UNFINISHED) :], 0)
        self.durations = Distribution(_DURATION_EDGES_S)
        """Seconds from the arrival of each job to its end."""

    @property
    def spool_folder(self) -> Path:
        """The folder for bodies on their way, which are files without names."""
        return Path(tempfile.gettempdir() if self._is_shared else self.keeper.place)

    @property
    def is_open(self) -> bool:
        """The store can be used, so that jobs are served."""
        return self.keeper.is_open

    @property
    def num_answered(self) -> int:
        """Number of instances with an answer that this service has stored."""
        return self._num_answered.total()

    def start(self) -> None:
        """Begin to open the store and to compute what it holds."""
        self._running = asyncio.create_task(self.keeper.run(self._use), name="jobs")

    def end(self) -> None:
        """Compute nothing more, give back what is not done, and end all waits."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._computing is not None:
            self._computing.cancel()
        self.watches.end()

    async def stop(self) -> None:
        """Close the store when everything is given back."""
        self.end()
        if self._running is not None:
            if self._computing is not None:
                await asyncio.gather(self._computing, return_exceptions=True)
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await in_thread(self._writers.shutdown)
        await self.keeper.close()

    def inputs_of(self, model: str) -> Sequence[TensorSpec]:
        """Return the input tensors of a model; empty if unknown."""
        pool = self._pools.get(model)
        return () if pool is None else pool.inputs

    def interface_of(self, model: str) -> Interface:
        """Return how clients speak to a model."""
        pool = self._pools.get(model)
        return USUAL_INTERFACE if pool is None else pool.interface

    def model_named(self, name: str | None) -> str:
        """Return the name of a model that is served; the default one for None.

        Raises:
            UnknownModelError: It is not served here.
        """
        name = self._default_model if name is None else name
        if name not in self._pools:
            known = ", ".join(self._pools) or "none"
            raise UnknownModelError(f"no model {name[:64]!r} is served here; these are: {known}")
        return name

    async def create(self, new: NewJob, instances: Instances) -> Job:
        """Store a job for good; the iterator runs in a thread, and its errors pass through.

        Returns:
            The job, or the one that the same call has made before.

        Raises:
            IdempotencyError: Another call has made a job with this id or key.
            InvalidInputError: There is no instance.
            OverQuotaError: The key has all the jobs, or bytes of them, that it may have.
            StoreFullError: The store has no room.
            UnavailableError: The store cannot be used.
        """
        store = await self.keeper.store()

        def write() -> tuple[Job, bool]:
            if (former := store.former(new)) is not None:  # at any quota
                return former, False
            with store.begin(new, time.time()) as writer:
                for instance in instances():
                    writer.add(instance)
                return writer.commit(time.time())

        job, is_new = await in_thread(write, threads=self._writers)
        if is_new:
            self._log("accepted", job)
            if self._runner is not None:
                self._runner.wake()
        return job

    async def job(self, id: str, owner: str) -> Job:
        """Return a job.

        Raises:
            UnknownJobError: There is none, or it is another owner's.
            UnavailableError: The store cannot be used.
        """
        store = await self.keeper.store()
        async with self._uses.place_in_line(owner):
            found = await in_thread(store.job, id, owner)
        if found is None:
            raise UnknownJobError(f"there is no job {id[:64]!r}; it may have expired")
        return found

    async def jobs(
        self, owner: str, states: Sequence[JobState], limit: int, before: str | None
    ) -> Sequence[Job]:
        """Return jobs, the newest first; `before` is the id of the last one of the page before."""
        store = await self.keeper.store()
        async with self._uses.place_in_line(owner):
            return await in_thread(
                lambda: store.jobs(owner=owner, states=states, limit=limit, before=before)
            )

    async def cancel(self, id: str, owner: str) -> Job:
        """End a job, and return it as it is then; see `job`."""
        if (job := await self.job(id, owner)).is_over:
            return job
        now, store = time.time(), await self.keeper.store()
        async with self._uses.place_in_line(owner):
            ended = await in_thread(store.cancel, id, now, owner)
        if ended is None:
            raise UnknownJobError(f"there is no job {id[:64]!r}; it may have expired")
        if ended.ended_at == now:  # else it was over before
            self._note(ended)
        return ended

    async def delete(self, id: str, owner: str) -> None:
        """Remove a job and its results; see `job`."""
        job = await self.job(id, owner)
        store = await self.keeper.store()
        async with self._uses.place_in_line(owner):
            await in_thread(store.delete, id, owner)
        if self._runner is not None:
            self._runner.drop(job)
        self.watches.forget(id, owner)

    async def answers(
        self, id: str, owner: str, first: int = 0, count: int | None = None
    ) -> AsyncIterator[Sequence[tuple[int, JobAnswer, int]]]:
        """Yield index, answer and version of what has an answer, in order and in chunks."""
        await self.job(id, owner)
        found = (await self.keeper.store()).answers(id, first, count, owner)
        while True:
            async with self._uses.place_in_line(owner):
                chunk = await in_thread(lambda: list(islice(found, _CHUNK)))
            if not chunk:
                return
            yield chunk

    def read_gauges(self) -> Iterator[Reading]:
        """Yield gauges and counters for `/metrics`."""
        for state in UNFINISHED:
            yield Reading(name="jobs", value=self.counts.jobs.get(state, 0), labels=(state,))
        yield Reading(name="job_instances_waiting", value=self.counts.num_waiting)
        yield Reading(name="job_store_open", value=self.is_open)
        yield Reading(name="job_store_bytes", value=self.counts.num_bytes)
        if self._num_free_bytes is not None:
            yield Reading(name="job_store_free_bytes", value=self._num_free_bytes)
        for state, num in self._num_ended.items():
            yield Reading(name="jobs_ended", value=num, labels=(state,))
        answered = self._num_answered
        for labels in product(self._pools, ("succeeded", "failed")):
            yield Reading(name="job_instances", value=answered.get(labels, 0), labels=labels)
        for outcome, num in self.webhooks.num_calls.items():
            yield Reading(name="webhook_calls", value=num, labels=(outcome,))

    async def _use(self, store: "JobStore") -> None:
        """Compute, announce, clean and count what a store holds until cancelled."""
        async with asyncio.TaskGroup() as group:
            if not self._is_ending:
                computing = _again(partial(self._compute, store), "compute jobs")
                self._computing = group.create_task(computing)
            group.create_task(_again(partial(self.webhooks.run, store), "tell webhooks of jobs"))
            group.create_task(_again(partial(self._clean, store), "clean the store of jobs"))
            group.create_task(_again(partial(self._count, store), "count jobs"))

    async def _compute(self, store: "JobStore") -> None:
        self._runner = Runner(
            store.leases,
            self._pools,
            on_change=self._note,
            share=self.keeper.limits.share,
            num_answered=self._num_answered,
        )
        await self._runner.run()

    async def _clean(self, store: "JobStore") -> None:
        """Delete what has expired, and end the jobs of models that were removed."""
        while True:
            with contextlib.suppress(ServiceError):
                await in_thread(store.clean, time.time())
                self._served |= set(self._pools)
                for model in self._served - set(self._pools):
                    self._served.discard(model)
                    text = f"{model} was removed from the service"
                    problem = JobProblem(code="unknown_model", message=text)
                    for job in await in_thread(store.fail_jobs, model, problem, time.time()):
                        self._note(job)
            await asyncio.sleep(_CLEAN_S)

    async def _count(self, store: "JobStore") -> None:
        while True:
            with contextlib.suppress(ServiceError, OSError):
                self.counts = await in_thread(store.counts)
                if not self._is_shared:
                    usage = await in_thread(shutil.disk_usage, self.keeper.place)
                    self._num_free_bytes = usage.free
            await asyncio.sleep(_COUNT_S)

    def _note(self, job: Job) -> None:
        """Count and log a change of a job, and wake all calls that wait for it."""
        if job.is_over:
            self._log(job.state, job)
            self._num_ended[job.state] += 1
            self.durations.observe((job.ended_at or job.created_at) - job.created_at)
            if self._runner is not None:
                self._runner.drop(job)
        self.watches.tell(job)

    def _log(self, event: str, job: Job) -> None:
        trace_id, _, span_id = job.trace.partition("-")
        ids = {"request_id": job.request_id, "trace_id": trace_id, "span_id": span_id}
        logger.info(
            "job %s %s: %d instances of %s, %d done, %d failed",
            job.id,
            event,
            job.num_instances,
            job.model,
            job.num_done,
            job.num_failed,
            extra={"job": job.id, **{name: value for name, value in ids.items() if value}},
        )


async def _again(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Run a task until cancelled: an unforeseen error in one must not end the others."""
    while True:
        try:
            return await work()
        except Exception:
            logger.exception("%s: this failed, and begins again in %g s", what, _RETRY_S)
            await asyncio.sleep(_RETRY_S)


def make_jobs(settings: Settings, pools: Mapping[str, Pool]) -> Jobs:
    """Build the jobs of a service from its settings.

    Raises:
        StartError: The key that signs webhooks cannot be used.
    """
    limits = StoreLimits(
        retention_s=settings.job_retention_s,
        max_jobs=settings.max_jobs,
        max_bytes=settings.max_job_bytes,
        share=settings.key_share,
    )
    hooks = Webhooks(settings.webhook_hosts, _webhook_secret(settings), settings.key_share)
    return Jobs(StoreKeeper(settings.job_store, limits), pools, settings.default_model, hooks)


def _webhook_secret(settings: Settings) -> bytes:
    """Read the key that signs webhooks; empty if there are none.

    Raises:
        StartError: It cannot be used.
    """
    file = settings.webhook_secret_file
    if not settings.webhook_hosts:
        return b""
    if file is None:
        raise StartError("calls to webhook_hosts are signed: name a file in webhook_secret_file")
    try:
        return read_secret(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise StartError(f"webhook_secret_file, {file}: {error}") from error
