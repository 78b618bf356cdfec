"""The agent's view of the ranks on its host that follow a lead on another host.

They take no batches: the lead calls them. Nothing here can tell whether they hang, since they show
no sign of life while they compute; the lead's host notices that by its batches and canaries.
"""

import asyncio
import logging
import signal
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from inferpool.models.speed.names import SpeedReport
from inferpool.workers.host.engine import Ending, Vitals, WorkerId, WorkerPeriods
from inferpool.workers.host.observed import OomKills
from inferpool.workers.host.rank_process import RankProcess
from inferpool.workers.ranks.ranked_worker import RankedWorker
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerLostError
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.messages import (
    BatchDone,
    FrameError,
    FromWorker,
    ItemRef,
    Leaving,
    LogLine,
    RankReady,
    Ready,
    StartFailed,
)

logger = logging.getLogger(__name__)

LET_GO = "let go by its lead"
"""Reason of the end of ranks whose lead leaves."""
_TERMINATE_S = 1.0


class FollowingWorker(RankedWorker):
    """The followers of one incarnation that run on this host. If one ends, all are ended."""

    def __init__(
        self,
        id: WorkerId,
        config: WorkerConfig,
        on_progress: Callable[[str], None],
        oom_kills: OomKills,
        periods: WorkerPeriods,
    ) -> None:
        """Make the queues and the shared memory of the ranks.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        super().__init__(id, config, oom_kills, periods)
        self.credit = 0
        self.has_worked = False
        self.is_stalled = False
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._ending: Ending | None = None
        self._looking: asyncio.TimerHandle | None = None

    def attach(self, processes: Sequence[BaseProcess]) -> None:
        """Take over the started processes: close their ends of the queues, listen, and watch."""
        self.wiring.close()
        for rank, process in zip(self.ranks, processes, strict=True):
            rank.attach(process, self)
        self._on_progress("meeting the ranks of other hosts")
        self._look()

    def run(self, items: Sequence[ItemRef]) -> "Future[BatchDone]":
        """Refuse a batch, which only the lead takes."""
        future: Future[BatchDone] = self._loop.create_future()
        text = f"{self.id} has no lead on this host"
        future.set_exception(WorkerLostError(text, started=False))
        return future

    async def stop(self, grace_s: float) -> None:
        """Wait until they have left with their lead; after `grace_s` send SIGTERM, then SIGKILL."""
        if self._gone.done():
            return
        self._note(Ending(cause="asked", reason="stopped"))
        if grace_s > 0:
            if await self._is_gone_within(grace_s):
                return
            for rank in self.ranks:
                rank.heartbeat.tell_to_leave()
            self._signal(signal.SIGTERM)
            if await self._is_gone_within(_TERMINATE_S):
                return
        await self.kill("stopped in a hurry")

    async def kill(self, reason: str, *, with_stacks: bool = False) -> None:
        """Kill the processes, if there are any, and wait for their exits.

        Args:
            reason: Explanation for people.
            with_stacks: Log the stacks of their threads first.
        """
        self._note(Ending(cause="signal", reason=reason))
        if not self.ranks[0].is_attached:
            self._close()
            return
        if with_stacks:
            await asyncio.gather(*(rank.log_stacks(reason, "") for rank in self._living()))
        await self._kill_all()

    def vitals(self) -> Vitals:
        """See `WorkerHandle.vitals`."""
        ranks = [self._vitals_of(rank) for rank in self.ranks]
        return Vitals(
            pid=ranks[0].pid,
            rss_bytes=sum(rank.rss_bytes for rank in ranks),
            last_beat_age_s=max(rank.last_beat_age_s for rank in ranks),
            num_batches=0,
            last_answer_age_s=0.0,
            ranks=ranks,
        )

    def on_message(self, rank: RankProcess, message: FromWorker) -> None:
        """See `RankListener`."""
        match message:
            case LogLine():
                log_line(message, rank.labels)
            case RankReady():
                self._followers[rank.number] = message
                if len(self._followers) == len(self.ranks) and not self.started.done():
                    self.started.set_result(self._make_ready())
            case Leaving():
                self._note(
                    Ending(cause=message.cause, reason=self._with_rank(rank, message.reason))
                )
            case StartFailed():
                text = self._with_rank(rank, message.message)
                self._fail_start(text, permanent=message.permanent, traceback=message.traceback)
            case _:
                raise FrameError(f"{type(message).__name__}, which this rank may not send")

    def on_mute(self, rank: RankProcess, reason: str) -> None:
        """See `RankListener`."""
        if reason:
            self._note(Ending(cause="exit", reason=self._with_rank(rank, reason)))

    def on_exit(self, rank: RankProcess) -> None:
        """See `RankListener`. The first exit ends the others too."""
        if rank.has_left:
            self._note(Ending(cause="asked", reason=LET_GO))
        else:
            cause, reason = rank.ending
            self._note(Ending(cause=cause, reason=self._with_rank(rank, reason)))
        assert self._ending is not None
        rank.log_last_stacks(self._ending.reason, "")
        if not rank.has_left:
            self._signal(signal.SIGKILL)
        self._fail_start(f"the process ended before it was ready: {self._ending.reason}")
        if all(each.is_gone for each in self.ranks) and not self._gone.done():
            self._close()
            self._gone.set_result(self._ending)

    def _make_ready(self) -> Ready:
        said = [self._followers[rank.number] for rank in self.ranks]
        return Ready(
            pid=self.ranks[0].pid,
            inputs=[],
            outputs=[],
            device=said[0].device,
            load_s=time.monotonic() - self._began,
            warmup_s=None,
            preloaded=True,
            speed=SpeedReport(),
            files=list({mark.path: mark for each in said for mark in each.files}.values()),
        )

    def _note(self, ending: Ending) -> None:
        """Note why it ends; what is noted first counts."""
        self._ending = self._ending or ending

    def _look(self) -> None:
        for rank in self.ranks:
            rank.look()
        self._looking = self._loop.call_later(self._periods.look_s, self._look)

    def _close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for rank in self.ranks:
            rank.close()
        self.wiring.close()
