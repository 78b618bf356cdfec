"""The front end's view of the decoders of one worker: it starts, replaces and ends them.

They prepare instances beside the worker, so that its GIL does not limit how many instances a device
gets. They are processes of the worker's incarnation, like the ranks of a split one: the same
forkserver starts them, since a worker could not fork any more once it has initialised its device;
the same observers report how they end, and they end with the worker and with the front end.

Once a worker is loaded it says what ring its decoders need. The front end creates the ring, and
announces it and each decoder through a socket that carries descriptors. The worker decides which
decoder gets which instance, and what happens to an instance after a death.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from asyncio import Task
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe

import msgspec

from inferpool.workers.decoders.ring import DecodingPlan, NewDecoder, NewRing, RingLayout
from inferpool.workers.host.attachment import Starter
from inferpool.workers.host.engine import DecoderHealth, WorkerId, WorkerPeriods
from inferpool.workers.host.local_worker import RankProcess
from inferpool.workers.host.observed import OomKills
from inferpool.workers.inside.entry import run_main
from inferpool.workers.shared.backoff import Backoff
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.log_lines import log_line
from inferpool.workers.shared.memory import SharedMemory, SharedMemoryError
from inferpool.workers.shared.messages import FromWorker, Leaving, LogLine, Ready, StartFailed
from inferpool.workers.shared.queues import FrameError

logger = logging.getLogger(__name__)

_MAIN = "inferpool.workers.decoders.decoder:main"
_RECENT_S = 60.0
"""Seconds that a death makes the next starts wait longer."""
_FIRST_PAUSE_S = 0.05
_MAX_IDLE_DEATHS = 5
"""Deaths in a row of decoders that have begun nothing, after which the next starts wait long."""


class DecoderHost:
    """The decoders of one worker, an `Attachment` to it."""

    def __init__(
        self,
        id: WorkerId,
        config: WorkerConfig,
        starter: Starter,
        on_gone: Callable[[], None],
    ) -> None:
        """Create the socket to the worker.

        Args:
            id: The worker.
            config: Its configuration.
            starter: Starts processes on this host.
            on_gone: Called after `end`, once no decoder is left.

        Raises:
            OSError: There are too few descriptors.
        """
        self._id = id
        self._config = config
        self._starter = starter
        self._on_gone = on_gone
        self._periods = starter.periods
        self._control, self.worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._ring: SharedMemory | None = None
        self._keeping: list[Task[None]] = []
        self._living: dict[int, RankProcess] = {}
        """Decoders that run, by number."""
        self._num_starts = [0] * config.decoders
        self._deaths: deque[float] = deque()
        """Times of the last deaths of any decoder."""
        self._num_idle_deaths = 0
        self.is_ending = False

    @property
    def is_gone(self) -> bool:
        """True if none is left, and none will be started."""
        return self.is_ending and not self._keeping

    def begin(self, ready: Ready) -> int:
        """Create the ring and start decoders; the worker may then hold one batch more."""
        said = ready.plans.get("decoders")
        if not said or self.is_ending:
            return 0
        plan = msgspec.msgpack.decode(said, type=DecodingPlan)
        num_decoders = self._config.decoders
        layout = RingLayout(
            num_decoders=num_decoders, num_slots=plan.num_slots, slot_bytes=plan.slot_bytes
        )
        try:
            self._ring = SharedMemory(layout.num_bytes, name="ring", writable=True)
            self._tell(NewRing(layout.num_bytes), [self._ring.fileno()])
        except (SharedMemoryError, OSError) as error:
            logger.error("%s gets no decoders: %s", self._id, error)
            return 0
        config = replace(self._config, decode=ready.speed.decode)
        for number in range(num_decoders):
            keeping = asyncio.create_task(
                self._keep(number, config, layout), name=f"decoder {number} of {self._id}"
            )
            self._keeping.append(keeping)
            keeping.add_done_callback(self._on_unkept)
        return 1

    def on_started(self) -> None:
        """Close the worker's end of the socket, since the worker has it."""
        self.worker_end.close()

    def end(self) -> None:
        """Kill them all; `on_gone` is called once their exits are confirmed."""
        if self.is_ending:
            return
        self.is_ending = True
        for keeping in self._keeping:
            keeping.cancel()
        self._settle()

    def look(self) -> None:
        """Record what cannot be read after the end of a decoder."""
        for decoder in self._living.values():
            decoder.look()

    def vitals(self) -> list[DecoderHealth]:
        """Return the state of those that run."""
        return [
            DecoderHealth(
                number=number,
                pid=decoder.pid,
                rss_bytes=decoder.rss_bytes,
                num_decoded=decoder.heartbeat.num_batches,
                restarts=self._num_starts[number] - 1,
            )
            for number, decoder in sorted(self._living.items())
        ]

    async def _keep(self, number: int, config: WorkerConfig, layout: RingLayout) -> None:
        """Run one decoder after the other."""
        while True:
            try:
                life = _DecoderLife(self._id, number, self._starter.oom_kills, self._periods)
            except (SharedMemoryError, OSError) as error:
                logger.warning("%s: no decoder can be started: %s", self._id, error)
                await asyncio.sleep(self._periods.max_decoder_pause_s)
                continue
            try:
                await self._run(life, config, layout)
            finally:
                self._living.pop(number, None)
                life.close()
            await asyncio.sleep(self._pause_s())

    async def _run(self, life: "_DecoderLife", config: WorkerConfig, layout: RingLayout) -> None:
        """Start a decoder, introduce it to the worker, and return once its exit is confirmed."""
        try:
            await self._starter.until_ready()
            await self._start_fully(life, config, layout)
        except Exception as error:  # anything that the start of a process may raise
            logger.warning("%s: a decoder could not be started: %s", self._id, error)
            self._num_idle_deaths += 1
            return
        self._living[life.number] = life.process
        self._num_starts[life.number] += 1
        try:
            life.introduce(self._tell)
            await life.ended(config.load_timeout_s)
        except BrokenPipeError:
            return  # its worker has ended, and it ends with it
        except OSError as error:
            logger.warning("%s cannot be told of a decoder: %s", self._id, error)
        finally:
            await life.kill()
        self._record_end(life)

    async def _start_fully(
        self, life: "_DecoderLife", config: WorkerConfig, layout: RingLayout
    ) -> None:
        """Start a process; if cancelled, wait for it and kill it: half-started it cannot be killed.

        Raises:
            Exception: See `_DecoderLife.start`.
        """
        starting = asyncio.ensure_future(life.start(self._starter, config, layout, self._ring))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if not starting.exception():
                await life.kill()
            raise

    def _record_end(self, life: "_DecoderLife") -> None:
        has_worked = life.process.heartbeat.last_received > 0
        self._num_idle_deaths = 0 if has_worked else self._num_idle_deaths + 1
        self._deaths.append(time.monotonic())
        if life.process.has_left:
            return  # its worker is gone
        logger.warning("%s ended: %s; starting another", life.process.name, life.reason)

    def _pause_s(self) -> float:
        """Return the seconds to wait before the next start: longer after more deaths."""
        if self._num_idle_deaths >= _MAX_IDLE_DEATHS:
            rest_s = self._periods.decoder_rest_s
            text = "%s: its decoders die before they do anything; it does without for %g s"
            logger.error(text, self._id, rest_s)
            return rest_s
        now = time.monotonic()
        while self._deaths and self._deaths[0] < now - _RECENT_S:
            self._deaths.popleft()
        pauses = Backoff(_FIRST_PAUSE_S, self._periods.max_decoder_pause_s)
        return pauses.pause_s(len(self._deaths))

    def _tell(self, message: NewRing | NewDecoder, fds: list[int]) -> None:
        socket.send_fds(self._control, [msgspec.msgpack.encode(message)], fds)

    def _on_unkept(self, keeping: Task[None]) -> None:
        self._keeping.remove(keeping)
        if not keeping.cancelled() and (error := keeping.exception()):
            logger.critical("a decoder of %s is no longer kept", self._id, exc_info=error)
        self._settle()

    def _settle(self) -> None:
        if self.is_gone:
            self.worker_end.close()
            self._control.close()
            if self._ring is not None:
                self._ring.close()
                self._ring = None
            self._on_gone()


class _DecoderLife:
    """One decoder, from before its start until its exit is confirmed."""

    def __init__(
        self, id: WorkerId, number: int, oom_kills: OomKills, periods: WorkerPeriods
    ) -> None:
        """Create the memory and the pipes that it will use.

        Raises:
            SharedMemoryError: There is too little memory.
            OSError: There are too few descriptors.
        """
        self.number = number
        self.process = RankProcess(
            id, number, oom_kills, is_alone=False, kind="decoder", periods=periods
        )
        self.reason = ""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = Pipe(duplex=False)
        self._answers = Pipe(duplex=False)

    async def start(
        self,
        starter: Starter,
        config: WorkerConfig,
        layout: RingLayout,
        ring: SharedMemory | None,
    ) -> None:
        """Start the process.

        Raises:
            Exception: It could not be started; nothing is left of it.
        """
        process = self.process
        ends = (self._tasks[0], self._answers[1], process.outbox)
        shared = (starter.arena, ring, layout, process.heartbeat.memory)
        args = (process.stacks, _MAIN, config, self.number, *ends, *shared)
        process.attach(await starter.start(run_main, process.name, args), self)

    def introduce(self, tell: Callable[[NewDecoder, list[int]], None]) -> None:
        """Pass the other ends of its pipes to the worker, and close them here.

        Raises:
            OSError: The worker does not listen.
        """
        process_fd = os.pidfd_open(self.process.pid)
        try:
            fds = [self._tasks[1].fileno(), self._answers[0].fileno(), process_fd]
            tell(NewDecoder(self.number, self.process.pid), fds)
        finally:
            os.close(process_fd)
            self._close_pipes()

    async def ended(self, load_timeout_s: float) -> None:
        """Wait for its exit; kill it if it does not get ready in time."""
        done, _ = await asyncio.wait([self._gone], timeout=load_timeout_s)
        if not done and not self.process.heartbeat.progressed_at:
            self.reason = f"not ready after {load_timeout_s:g} s"
            return
        await asyncio.shield(self._gone)

    async def kill(self) -> None:
        """Kill it, and wait for its exit."""
        self.process.signal(signal.SIGKILL)
        await asyncio.shield(self._gone)

    def close(self) -> None:
        """Release what it wrote to."""
        self._close_pipes()
        self.process.close()

    def on_message(self, rank: RankProcess, message: FromWorker) -> None:
        match message:
            case LogLine():
                log_line(message, rank.labels)
            case Leaving():
                self.reason = message.reason
            case StartFailed():
                self.reason = message.message
            case _:
                raise FrameError(f"{type(message).__name__}, which a decoder may not send")

    def on_mute(self, rank: RankProcess, reason: str) -> None:
        self.reason = self.reason or reason

    def on_exit(self, rank: RankProcess) -> None:
        self.reason = self.reason or rank.ending[1]
        rank.log_last_stacks(self.reason, "")
        self._gone.set_result(None)

    def _close_pipes(self) -> None:
        for end in (*self._tasks, *self._answers):
            end.close()
