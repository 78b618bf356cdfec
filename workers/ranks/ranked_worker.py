"""The part of a worker's view that its kinds share: its processes on this host, start and end."""

import asyncio
import logging
import signal
from asyncio import Future
from collections.abc import Iterator

from inferpool.workers.host.engine import Ending, RankHealth, WorkerId, WorkerPeriods
from inferpool.workers.host.observed import OomKills
from inferpool.workers.host.rank_process import RankProcess
from inferpool.workers.ranks.wiring import Wiring
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import RankReady, Ready

logger = logging.getLogger(__name__)


class RankedWorker:
    """One incarnation of a worker: those of its processes that run on this host."""

    def __init__(
        self, id: WorkerId, config: WorkerConfig, oom_kills: OomKills, periods: WorkerPeriods
    ) -> None:
        """Make the queues and the shared memory of the processes.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        self.id = id
        self._periods = periods
        self.is_given_up = False
        """True once nobody waits for its start any more."""
        self._is_alone = config.placement.num_ranks == 1
        self.ranks = [
            RankProcess(id, rank, oom_kills, is_alone=self._is_alone, periods=periods)
            for rank in range(config.placement.num_ranks)
        ]
        self.wiring = Wiring(config.placement.num_ranks)
        self._device_names = config.placement.names
        self._loop = asyncio.get_running_loop()
        self.started: Future[Ready] = self._loop.create_future()
        """Done once it may be used."""
        self._gone: Future[Ending] = self._loop.create_future()
        self._followers: dict[int, RankReady] = {}
        """Messages of the followers that are ready, by rank."""

    @property
    def ready(self) -> Ready:
        """Message in which the worker announced that it was ready."""
        return self.started.result()

    async def wait(self) -> Ending:
        """See `Incarnation.wait`."""
        return await asyncio.shield(self._gone)

    def _said_by(self, rank: RankProcess) -> Ready | RankReady | None:
        """Return the message in which a process announced that it was ready."""
        return self._followers.get(rank.number)

    def _vitals_of(self, rank: RankProcess) -> RankHealth:
        said = self._said_by(rank)
        part = said.part if said else None
        return RankHealth(
            rank=rank.number,
            pid=rank.pid,
            device=self._device_names[rank.number],
            device_name=said.device if said else "",
            rss_bytes=rank.rss_bytes,
            part_bytes=part.num_bytes if part else 0,
            part=part.text if part else "",
            last_beat_age_s=0.0 if self._gone.done() else round(rank.heartbeat.age_s, 3),
        )

    def _with_rank(self, rank: RankProcess, text: str) -> str:
        """Return a text about a process, with its rank if there are several."""
        return text if self._is_alone else f"rank {rank.number}: {text}"

    def _fail_start(self, message: str, *, permanent: bool = False, traceback: str = "") -> None:
        if not self.started.done():
            error = WorkerStartError(message, permanent=permanent, traceback=traceback)
            self.started.set_exception(error)
            self.started.exception()  # mark it as retrieved: the start may have been cancelled

    async def _kill_all(self) -> None:
        self._signal(signal.SIGKILL)
        if not await self._is_gone_within(self._periods.exit_s):
            logger.critical("%s does not exit after SIGKILL (stuck in the kernel?)", self.id)

    def _living(self) -> Iterator[RankProcess]:
        return (rank for rank in self.ranks if not rank.is_gone)

    def _signal(self, signum: int) -> None:
        for rank in self._living():
            rank.signal(signum)

    async def _is_gone_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._gone], timeout=timeout_s)
        return bool(done)
