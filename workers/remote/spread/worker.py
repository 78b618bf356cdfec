"""The front end's view of one incarnation of a worker that is spread over several hosts.

The part with the lead takes the batches. The end of any part ends all of them, since the ranks can
do nothing without each other.
"""

import asyncio
import contextlib
import logging
import secrets
from asyncio import Future, Task
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from inferpool.models.files.opened import FileMark
from inferpool.workers.host.engine import Cause, Ending, Vitals, WorkerId
from inferpool.workers.ranks.following_worker import LET_GO
from inferpool.workers.remote.host import RemoteHost
from inferpool.workers.remote.wire import MeetingPlace
from inferpool.workers.remote.worker import RemoteWorker
from inferpool.workers.shared.config import HostPart, WorkerConfig
from inferpool.workers.shared.errors import FilesChangedError, WorkerLostError, WorkerStartError
from inferpool.workers.shared.messages import BatchDone, ItemRef

logger = logging.getLogger(__name__)

_FOLLOW_OUT_S = 5.0
"""Seconds that the other parts may take to leave after the lead has left as it was told."""
_OUR_DOING: Sequence[Cause] = ("host", "asked")
"""Causes for which no batch is to blame: a host was lost, or its agent was told to stop."""


class SpreadWorker:
    """One incarnation: a worker of each of its hosts."""

    def __init__(self, id: WorkerId, parts: Mapping[str, RemoteWorker]) -> None:
        """Watch parts that have started.

        Args:
            id: The worker.
            parts: The part of each host, the one with the lead first.

        Raises:
            FilesChangedError: They have not loaded the same files.
        """
        self.id = id
        self._parts = dict(parts)
        self._lead = next(iter(self._parts.values()))
        self.ready = msgspec.structs.replace(self._lead.ready, files=_files_of(parts))
        self._loop = asyncio.get_running_loop()
        self._gone: Future[Ending] = self._loop.create_future()
        self._first: Ending | None = None
        """End of the part that has ended first."""
        self._is_stopping = False
        self._watching = asyncio.create_task(self._watch(), name=f"watch {id}")

    @property
    def credit(self) -> int:
        """Number of batches that it may hold."""
        return self._lead.credit

    @property
    def has_worked(self) -> bool:
        """True once it has answered a batch."""
        return self._lead.has_worked

    @property
    def is_stalled(self) -> bool:
        """True if it computes nothing, and one of its parts or hosts gives no sign of life."""
        return any(part.is_stalled for part in self._parts.values())

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """See `WorkerHandle.run`."""
        future: Future[BatchDone] = self._loop.create_future()
        self._lead.run(items).add_done_callback(partial(self._pass_on, future))
        return future

    async def wait(self) -> Ending:
        """See `Incarnation.wait`."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float) -> None:
        """Let the lead finish and leave, and the others with it; see `Incarnation.stop`."""
        self._is_stopping = True
        if grace_s > 0:
            await self._lead.stop(grace_s)
            await asyncio.wait([self._gone], timeout=2 * _FOLLOW_OUT_S)
        if not self._gone.done():
            await asyncio.gather(*(part.stop(0.0) for part in self._parts.values()))

    def vitals(self) -> Vitals:
        """See `WorkerHandle.vitals`."""
        vitals = {host: part.vitals() for host, part in self._parts.items()}
        return replace(
            self._lead.vitals(),
            rss_bytes=sum(each.rss_bytes for each in vitals.values()),
            ranks=[
                replace(rank, host=host) for host, each in vitals.items() for rank in each.ranks
            ],
        )

    def _pass_on(self, future: "Future[BatchDone]", from_lead: "Future[BatchDone]") -> None:
        """Settle a batch as the lead did, but count it as lost only once all parts have ended."""
        error = from_lead.exception()
        if error is not None:
            self._gone.add_done_callback(lambda _: self._fail(future, error))
        elif not future.done():  # else nobody waits for it any more
            future.set_result(from_lead.result())

    def _fail(self, future: "Future[BatchDone]", error: BaseException) -> None:
        """Fail a batch; the loss of a host is not its fault."""
        first = self._gone.result()
        if first.cause == "host":
            error = WorkerLostError(first.reason, started=False, with_host=True)
        if not future.done():
            future.set_exception(error)

    async def _watch(self) -> None:
        """Wait for the end of a part, and end the others."""
        waits = [asyncio.create_task(part.wait()) for part in self._parts.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._first = first = _explaining(waits)
            if first.reason == LET_GO:
                await asyncio.wait(waits[:1], timeout=_FOLLOW_OUT_S)
                self._first = first = _explaining(waits)
            await self._end_others(first)
            endings = await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        was_at_work = any(ending.was_at_work for ending in endings) and first.cause != "host"
        self._gone.set_result(replace(first, was_at_work=was_at_work))

    async def _end_others(self, first: Ending) -> None:
        followers = [part for part in self._parts.values() if part is not self._lead]
        if self._lead.is_gone:
            grace_s = _FOLLOW_OUT_S if self._is_stopping or first.cause == "canary" else 0.0
            await asyncio.gather(*(part.stop(grace_s) for part in followers))
            return
        if not self._is_stopping:
            logger.warning("%s is ended on all of its hosts: %s", self.id, first.reason)
        if first.cause in _OUR_DOING or self._is_stopping:
            await asyncio.gather(*(part.stop(0.0) for part in self._parts.values()))
        else:  # what it computes may be to blame
            self._lead.lose(first.reason)
            await asyncio.gather(*(part.stop(0.0) for part in followers))


def _explaining(waits: Sequence[Task[Ending]]) -> Ending:
    """Return the end that explains the others, if there are several: of a host, or of the lead."""
    endings = [wait.result() for wait in waits if wait.done()]
    return next((each for each in endings if each.cause == "host"), endings[0])


async def start_spread(
    id: WorkerId,
    config: WorkerConfig,
    hosts: Mapping[str, RemoteHost],
    on_progress: Callable[[str], None],
) -> SpreadWorker:
    """Start a worker on all of its hosts.

    Args:
        id: The worker.
        config: Its configuration, with the hosts that it is spread over.
        hosts: The hosts that are connected, by name.
        on_progress: Called with each step, for people.

    Raises:
        WorkerStartError: A host is not connected, or a part did not become ready. None is left.
    """
    missing = [share.host for share in config.shares if share.host not in hosts]
    if missing:
        raise WorkerStartError(f"not connected: {', '.join(missing)}", permanent=False)
    chosen = {share.host: hosts[share.host] for share in config.shares}  # others may leave now
    starts: dict[str, Task[RemoteWorker]] = {}
    met: Future[MeetingPlace] = asyncio.get_running_loop().create_future()

    def begin(name: str, own: WorkerConfig, on_place: Callable[[MeetingPlace], None]) -> None:
        start = chosen[name].start(id, own, on_progress if not starts else _ignore, on_place)
        starts[name] = asyncio.create_task(start, name=f"start {id} on {name}")

    try:
        (lead, own), *others = configs_of(config).items()
        begin(lead, own, lambda place: None if met.done() else met.set_result(place))
        starting: list[Future[MeetingPlace] | Task[RemoteWorker]] = [met, starts[lead]]
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        if met.done():
            place = met.result()
            for name, own in others:
                assert own.part is not None
                where = replace(own.part, address=place.address, port=place.port)
                begin(name, replace(own, part=where), _ignore)
        await asyncio.wait(starts.values(), return_when=asyncio.FIRST_EXCEPTION)
        _raise_failure(starts)
        return SpreadWorker(id, {name: start.result() for name, start in starts.items()})
    except BaseException:
        await _end(starts)
        raise


def configs_of(config: WorkerConfig) -> dict[str, WorkerConfig]:
    """Return what each host of a spread worker is told, by its name; the lead's host is the first.

    They share a new token, and do not know the meeting place yet.
    """
    token = secrets.token_hex(32)
    configs, first = {}, 0
    for share in config.shares:
        part = HostPart(first=first, placement=share.placement, token=token)
        configs[share.host] = replace(config, host=share.host, shares=(), part=part)
        first += share.placement.num_ranks
    return configs


def _raise_failure(starts: Mapping[str, Task[RemoteWorker]]) -> None:
    """Raise the failure of a part, if there is one; one that is permanent explains the others.

    Raises:
        WorkerStartError: A part did not become ready.
    """
    failures: list[WorkerStartError] = []
    for name, start in starts.items():
        error = start.exception() if start.done() and not start.cancelled() else None
        if isinstance(error, WorkerStartError):
            text = f"on {name}: {error}"
            failures.append(
                WorkerStartError(text, permanent=error.permanent, traceback=error.traceback)
            )
        elif error is not None:
            raise error
    if failures:
        raise max(failures, key=lambda error: error.permanent)


async def _end(starts: Mapping[str, Task[RemoteWorker]]) -> None:
    """End all parts, whether they have started or not."""
    for start in starts.values():
        start.cancel()
    await asyncio.wait(starts.values()) if starts else None
    for start in starts.values():
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await start.result().stop(0.0)


def _files_of(parts: Mapping[str, RemoteWorker]) -> list[FileMark]:
    """Return the files that all parts have loaded.

    Raises:
        FilesChangedError: Two hosts have different files of the same name.
    """
    files: dict[str, tuple[str, FileMark]] = {}
    for host, part in parts.items():
        for mark in part.ready.files:
            other, known = files.setdefault(mark.path, (host, mark))
            if known.digest != mark.digest:
                raise FilesChangedError(
                    f"{mark.path} is not the same on {other} and {host}: copy the same model to "
                    "all hosts"
                )
    return [mark for _, mark in files.values()]


def _ignore(_: object) -> None:
    pass
