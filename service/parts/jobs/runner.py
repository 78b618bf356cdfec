"""Computes the jobs of the store with this service's pools, part by part, in the event loop.

The order makes jobs durable: a part is leased, its instances are queued, their results are
committed, and only then is the part forgotten. If a service dies, its parts are leased again.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from inferpool.models.attached import attached
from inferpool.service.errors import (
    DeadlineExceededError,
    InternalError,
    OverloadedError,
    ServiceError,
    StoreFullError,
    UnavailableError,
)
from inferpool.service.parts.jobs.records import (
    Job,
    JobAnswer,
    JobProblem,
    LeasedPart,
    LeaseRoom,
    PartResult,
    StoredInstance,
)
from inferpool.service.parts.jobs.threads import in_thread
from inferpool.service.queue.instance import BACKGROUND
from inferpool.service.queue.pool import Pool
from inferpool.workers.shared.backoff import Backoff
from inferpool.workers.shared.messages import ItemRef

if TYPE_CHECKING:
    from inferpool.service.parts.jobs.store.leases import PartLeases

logger = logging.getLogger(__name__)

_DEADLINE_S = 3600.0
"""An instance that waits longer behind interactive calls is queued again."""
_LEAST_IN_FLIGHT = 128
_BATCHES_IN_FLIGHT = 4
"""Batches in flight for each worker, so that none waits for the store."""
_MOST_PARTS = 512
_MOST_BYTES = 64 * 2**20
"""Bounds of all parts in flight. A model that has none gets one in any case."""
_MOST_TRIES = 5
"""How often an instance is computed that workers have no memory or time for."""
_PATIENCE_S = 30.0
"""A part is given back if no worker was there for so long: another service may have some."""
_PAUSE_S = 0.2
_MOST_PAUSE_S = 5.0
_POLL_S = 1.0
"""How often to look for parts that nobody has announced."""
_NUM_THREADS = 4
_LEASE_S = 15.0
"""How long the parts of a service that died wait, where another one shares its store."""
_RENEW_S = 4.0
"""How often a service says that it still computes its parts."""


class Runner:
    """Leases parts while pools have room, and commits their results."""

    def __init__(
        self,
        store: "PartLeases",
        pools: Mapping[str, Pool],
        *,
        on_change: Callable[[Job], None],
        share: float = 1.0,
        lease_s: float = _LEASE_S,
        num_answered: Counter[tuple[str, str]] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            store: The store. Its methods are called in threads.
            pools: The pools that serve, by model.
            on_change: Called with each job after a part of it was committed.
            share: The part of what others leave that the jobs of one owner may have in flight.
            lease_s: How long parts are this service's alone, unless it prolongs that.
            num_answered: Counts instances with a stored answer, by model and outcome.
        """
        self._store = store
        self._pools = pools
        self._lease_s = lease_s
        self._on_change = on_change
        self._share = share
        self._callers: dict[str, int] = {"": 0}
        """Numbers of owners, who take turns in the queues of models. Those of keys are positive."""
        self._parts: dict[str, tuple[LeasedPart, asyncio.Task[None]]] = {}
        """The parts in flight and what computes them, by token."""
        self._committing: set[str] = set()
        """Tokens of those whose results are known."""
        self._unused: set[str] = set()
        """Tokens of leased parts that nothing computes, to be given back."""
        self._taken: Sequence[LeasedPart] = ()
        """Leased parts that are on their way from the thread."""
        self._renewed_at = 0.0
        self._ready_at: dict[str, float] = {}
        """When each model's workers were last seen ready."""
        self._in_flight: Counter[str] = Counter()
        """Instances in flight by model."""
        self._num_answered = Counter() if num_answered is None else num_answered
        self._num_bytes = 0
        """Payload bytes in flight."""
        self._problem = ""
        """The reason why no part can be leased; the log has it."""
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="parts of jobs")

    def wake(self) -> None:
        """Search for parts soon: there is a new job, or room for more."""
        self._wake.set()

    def drop(self, job: Job) -> None:
        """Cancel the parts of a job that is over."""
        for part, task in self._parts.values():
            if part.job.folder == job.folder:
                task.cancel()

    async def run(self) -> None:
        """Compute jobs until cancelled; then give back what is not done."""
        renewing = asyncio.create_task(self._renew_often(), name="renew the leases of jobs")
        try:
            while True:
                self._wake.clear()
                if not await self._lease():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await self._wake.wait()
        finally:
            renewing.cancel()
            await self._end()

    async def _lease(self) -> bool:
        """Begin to compute as many parts as there is room for; return whether there were any."""
        found = False
        for name, pool in list(self._pools.items()):
            room = self._room(name, pool)
            if room is None:
                continue
            try:
                # After a pause of the process, its own parts must not seem to be a dead one's.
                if time.monotonic() - self._renewed_at > self._lease_s / 2:
                    await self._renew()
                leased = await in_thread(self._take, name, room, threads=self._threads)
            except ServiceError as error:  # it is tried again
                if error.message != self._problem:
                    logger.warning("jobs of %s wait: %s", name, error)
                self._problem = error.message
                return False
            except Exception:
                logger.exception("jobs of %s cannot be computed", name)
                return False
            self._taken, self._problem = (), ""
            for part in leased:
                found = True
                self._in_flight[name] += len(part.instances)
                self._num_bytes += part.num_bytes
                task = asyncio.create_task(self._finish(part), name="compute a part of a job")
                self._parts[part.token] = (part, task)
                task.add_done_callback(partial(self._forget, part))  # one may never begin
        return found

    def _take(self, model: str, room: LeaseRoom) -> Sequence[LeasedPart]:
        """Lease parts, in a thread."""
        self._taken = self._store.lease({model}, room, self._lease_s, time.time())
        return self._taken

    def _room(self, name: str, pool: Pool) -> LeaseRoom | None:
        """Return how much more a model's workers should have within reach; None if nothing."""
        if not pool.is_ready:
            return None
        self._ready_at[name] = time.monotonic()
        dispatcher = pool.dispatcher
        wanted = dispatcher.num_responsive * dispatcher.max_batch_size * _BATCHES_IN_FLIGHT
        num_instances = max(wanted, _LEAST_IN_FLIGHT) - self._in_flight[name]
        num_bytes, num_parts = _MOST_BYTES - self._num_bytes, _MOST_PARTS - len(self._parts)
        if self._in_flight[name] and min(num_instances, num_bytes, num_parts) <= 0:
            return None
        return LeaseRoom(
            num_instances=num_instances,
            num_bytes=max(1, num_bytes),
            num_parts=max(1, num_parts),
            share=self._share,
            held=self._held(name),
        )

    def _held(self, model: str) -> dict[str, LeaseRoom]:
        """Return what owners have in flight: instances of a model, and bytes and parts of all."""
        held: dict[str, LeaseRoom] = {}
        for part, _ in self._parts.values():
            owner, num = part.job.owner, len(part.instances)
            own = held.get(owner) or LeaseRoom(num_instances=0, num_bytes=0, num_parts=0)
            held[owner] = LeaseRoom(
                num_instances=own.num_instances + (num if part.job.model == model else 0),
                num_bytes=own.num_bytes + part.num_bytes,
                num_parts=own.num_parts + 1,
            )
        return held

    async def _finish(self, part: LeasedPart) -> None:
        try:
            await self._commit(part, await self._compute(part))
        except Exception as error:
            if isinstance(error, ServiceError):  # the model is gone, or pauses
                logger.debug("a part of job %s is given back: %s", part.job.id, error)
            else:
                logger.exception("a part of job %s is given back", part.job.id)
            self._unused.add(part.token)
            await self._give_back()
            await asyncio.sleep(_PAUSE_S)

    def _forget(self, part: LeasedPart, _: asyncio.Task[None]) -> None:
        """Free the room that a part had."""
        self._committing.discard(part.token)
        del self._parts[part.token]
        self._in_flight[part.job.model] -= len(part.instances)
        self._num_bytes -= part.num_bytes
        self._wake.set()

    async def _compute(self, part: LeasedPart) -> PartResult:
        """Compute all instances of a part with the version that serves now.

        Raises:
            UnavailableError: Another version serves meanwhile, or none.
        """
        pool = self._pools.get(part.job.model)
        if pool is None:
            raise UnavailableError(f"{part.job.model} is not served any more")
        is_needed = any(each.kind is not None for each in part.instances)
        tasks = [asyncio.ensure_future(self._answer(pool, part.job, i)) for i in part.instances]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return PartResult(answers=answers, version=pool.version if is_needed else 0)

    async def _answer(self, pool: Pool, job: Job, instance: StoredInstance) -> JobAnswer:
        """Compute one instance, and queue it again if it was no fault of its own.

        Raises:
            UnavailableError: The pool does not serve any more.
        """
        if instance.kind is None:
            return JobAnswer(value=b"", problem=instance.problem)
        num_tries = 0
        caller = self._callers.setdefault(job.owner, -len(self._callers))
        while True:
            ref = ItemRef(
                kind=instance.kind,
                offset=0,
                num_bytes=len(instance.payload),
                deadline=time.monotonic() + _DEADLINE_S,
                headers=instance.headers,
                parameters=job.parameters,
                request_id=job.request_id,
                trace=job.trace,
                priority=BACKGROUND,
                caller=caller,
            )
            try:
                queued = pool.submit(ref, [instance.payload])
                num_tries += 1
                result = await queued
            except (OverloadedError, UnavailableError, DeadlineExceededError) as error:
                if self._pools.get(job.model) is not pool:
                    raise UnavailableError("another version serves now") from error
                if num_tries >= _MOST_TRIES and pool.is_ready:
                    return _failed(error)
                await self._until_answered()
            except ServiceError as error:
                return _failed(error)
            except Exception:
                logger.exception("an instance of job %s cannot be computed", job.id)
                return _failed(InternalError("it cannot be computed; see the log of the service"))
            else:
                self._answered.set()
                if isinstance(result.value, bytes):
                    return JobAnswer(value=result.value)
                return JobAnswer(value=attached("content in JSON")(result.value))

    async def _until_answered(self) -> None:
        """Wait until an answer to this runner leaves room, or until a moment."""
        self._answered.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self._answered.wait()

    async def _commit(self, part: LeasedPart, result: PartResult) -> None:
        """Commit results, and keep them until the store has room."""
        self._committing.add(part.token)
        pauses = Backoff(_PAUSE_S, _MOST_PAUSE_S)
        while True:
            try:
                job = await in_thread(
                    self._store.commit_part, part, result, time.time(), threads=self._threads
                )
                break
            except (StoreFullError, UnavailableError) as error:
                logger.warning("job %s: results wait to be kept: %s", part.job.id, error)
                await asyncio.sleep(pauses.next_s())
        if job is not None:
            for answer in result.answers:
                self._num_answered[job.model, "failed" if answer.problem else "succeeded"] += 1
            self._on_change(job)

    async def _renew_often(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            self._give_up_waiting()
            try:
                await self._renew()
            except ServiceError:  # it is logged, and tried again
                continue
            except Exception:
                logger.exception("the leases of jobs cannot be renewed")
            await self._give_back()

    def _give_up_waiting(self) -> None:
        """Cancel the parts of models that have had no workers for long."""
        now = time.monotonic()
        for name, pool in self._pools.items():
            if pool.is_ready:
                self._ready_at[name] = now
        for token, (part, task) in self._parts.items():
            is_known = token in self._committing
            if not is_known and now > self._ready_at[part.job.model] + _PATIENCE_S:
                self._unused.add(token)
                task.cancel()

    async def _renew(self) -> None:
        """Prolong the leases of what is in flight, and give up what is not this service's.

        Raises:
            ServiceError: The store cannot be used.
        """
        tokens, began = list(self._parts), time.monotonic()
        if tokens:
            held = await in_thread(self._store.renew, tokens, self._lease_s, threads=self._threads)
            for token in set(tokens) - held:  # that of a part which is kept by now is none
                if token in self._parts and token not in self._committing:
                    self._parts[token][1].cancel()
        self._renewed_at = began

    async def _give_back(self) -> None:
        """Return the parts that nothing computes to the store; if that fails, later."""
        tokens = list(self._unused)
        if tokens:
            with contextlib.suppress(ServiceError):
                await in_thread(self._store.give_back, tokens, threads=self._threads)
                self._unused.difference_update(tokens)

    async def _end(self) -> None:
        tasks = [task for _, task in self._parts.values()]
        self._unused.update(self._parts, (part.token for part in self._taken))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._give_back()
        self._threads.shutdown(wait=False)


def _failed(error: ServiceError) -> JobAnswer:
    return JobAnswer(value=b"", problem=JobProblem(code=error.code, message=error.message))
