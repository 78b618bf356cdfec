"""The front end's view of a worker that is a group: one process for each device of a split replica.

The lead (rank 0) does what the process of any other worker does. If one process of the group ends,
all are ended, since they can do nothing without each other.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess

from inferpool.workers.host.engine import RankHealth, Vitals, WorkerId, WorkerPeriods
from inferpool.workers.host.local_worker import PAUSE_S, LocalWorker, Program, RankProcess
from inferpool.workers.host.observed import OomKills
from inferpool.workers.ranks import worker_side
from inferpool.workers.ranks.wiring import Wiring
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import FromWorker, Leaving, LogLine, RankReady, StartFailed
from inferpool.workers.shared.queues import FrameError


class RankedWorker(LocalWorker):
    """One incarnation of a worker that has several processes."""

    def __init__(
        self,
        id: WorkerId,
        config: WorkerConfig,
        on_progress: Callable[[str], None],
        oom_kills: OomKills,
        periods: WorkerPeriods,
    ) -> None:
        """Connect the ranks, besides what `LocalWorker` makes.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        super().__init__(id, config, on_progress, oom_kills, periods)
        self._wiring = Wiring(config.placement.num_ranks)
        self._followers: dict[int, RankReady] = {}
        """Messages of the followers that are ready, by rank."""
        self._is_end_known = False
        """True once one of the processes has ended."""

    def program_of(self, rank: RankProcess, arena: object) -> Program:
        """Return what one of its processes runs; the arena is the memory with the payloads."""
        ends = self._wiring.ends_of(rank.number)
        if rank is self.lead:
            _, args = super().program_of(rank, arena)
            return worker_side.lead, (ends, *args)
        row = rank.heartbeat.memory
        return worker_side.follow, (ends, self._config, rank.outbox, row, rank.stacks)

    def attach(self, processes: Sequence[BaseProcess]) -> None:
        """Close the ranks' ends of their connections, and use the started processes."""
        self._wiring.close()
        super().attach(processes)

    def vitals(self) -> Vitals:
        """Return the present state, with that of each rank."""
        return replace(super().vitals(), ranks=[self._vitals_of(rank) for rank in self.ranks])

    def on_message(self, rank: RankProcess, message: FromWorker) -> None:
        """Handle a message of a process: followers send other ones than the lead."""
        if rank is self.lead or isinstance(message, LogLine | Leaving | StartFailed):
            super().on_message(rank, message)
        elif isinstance(message, RankReady):
            self._followers[rank.number] = message
            self._prove()
        else:
            raise FrameError(f"{type(message).__name__}, which no follower may send")

    def _prove(self) -> None:
        """Send the first canary once all ranks have loaded."""
        if self._ready is not None and len(self._followers) == len(self.ranks) - 1:
            super()._prove()

    def _vitals_of(self, rank: RankProcess) -> RankHealth:
        said = self._ready if rank is self.lead else self._followers.get(rank.number)
        part = said.part if said else None
        return RankHealth(
            rank=rank.number,
            pid=rank.pid,
            device=self._config.placement.names[rank.number],
            device_name=said.device if said else "",
            rss_bytes=rank.rss_bytes,
            part_bytes=part.num_bytes if part else 0,
            part=part.text if part else "",
            last_beat_age_s=0.0 if self._gone.done() else round(rank.heartbeat.age_s, 3),
        )

    def _record_end(self, rank: RankProcess) -> None:
        """End the other processes at the end of the first."""
        if self._is_end_known:
            return
        self._is_end_known = True
        super()._record_end(rank)
        for other in self._living():
            if rank.has_left:
                self._loop.call_later(self._periods.follow_out_s, other.signal, signal.SIGKILL)
            else:
                other.signal(signal.SIGKILL)

    async def _look_after(self, now: float, late_s: float) -> None:
        if late_s <= PAUSE_S and (silent := self._silent_follower()):
            self._cause, self._is_our_doing = "hang", True
            await self.kill(silent, with_stacks=True)
        else:
            await super()._look_after(now, late_s)

    def _silent_follower(self) -> str:
        """Return why the worker counts as hung if an idle follower gives no heartbeat; else ""."""
        if not self.started.done() or self.carrier.held.is_any_begun:
            return ""
        for rank in self.ranks[1:]:
            if rank.heartbeat.age_s > self.patience_s:
                text = f"hung: it was idle, and showed no sign of life for {self.patience_s:g} s"
                return rank.about(text)
        return ""

    def _close(self) -> None:
        super()._close()
        self._wiring.close()
