"""The process of a front: it serves connections, answers predictions, and forwards other calls."""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from mmap import mmap
from multiprocessing.connection import Connection

from inferpool.service.api.wire.held import held_bytes
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.api.wire.server import DrainingServer
from inferpool.service.endpoint import make_guard, make_predict, server_config
from inferpool.service.parts.fronts.forwarding import Forwarder
from inferpool.service.parts.fronts.front_side import FrontSide
from inferpool.service.parts.fronts.messages import (
    Command,
    CountRequest,
    FrontConfig,
    FrontCounts,
    Leave,
    Listening,
    MoveAway,
    MovedAway,
)
from inferpool.service.settings.tls import server_context
from inferpool.service.telemetry.metrics import ModelMetrics
from inferpool.workers.shared.arena import Slots
from inferpool.workers.shared.guard import HANDLED_SIGNALS, die_with_front_end, die_with_parent
from inferpool.workers.shared.log_lines import LineHandler
from inferpool.workers.shared.messages import LogLine

logger = logging.getLogger(__name__)

_MAX_TAKEN = 64
"""Connections taken in one turn of the loop."""


def run(
    config: FrontConfig,
    memory: mmap,
    reader: Connection,
    writer: Connection,
    channel: socket.socket,
) -> None:
    """Run a front until it is asked to leave, or until the main process ends."""
    die_with_parent(config.main_pid)
    die_with_front_end()
    # Ctrl-C and a stop of the whole cgroup reach fronts too; only the main process decides.
    for signum in HANDLED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, 2, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    slots = Slots(memory, config.part.start, len(config.part))
    for offset, num_bytes in config.held.items():
        slots.reserve(offset, num_bytes)

    async def main() -> None:
        await Front(config, slots, reader, writer, channel).run()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class _Server(DrainingServer):
    """A server of connections that the main process has accepted."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals: the main process says when to leave."""
        yield


class Front:
    """Serves connections from the main process and does what it says. Lives in the event loop."""

    def __init__(
        self,
        config: FrontConfig,
        slots: Slots,
        reader: Connection,
        writer: Connection,
        channel: socket.socket,
    ) -> None:
        settings = config.settings
        self._thread = threading.get_ident()
        self._family = config.family
        self._channel = channel
        self._num_taken = 0
        self._moving: asyncio.Task[None] | None = None
        self._metrics: defaultdict[str, ModelMetrics] = defaultdict(lambda: ModelMetrics(""))
        self._front_side = FrontSide(reader, writer, slots, self._obey, _end, settings.key_share)
        self._send_logs_to_main(config.log_level)
        self._tracer = None
        if settings.trace_endpoint is not None:  # else nothing of it is imported
            from inferpool.service.parts.tracing.setup import make_tracer

            self._tracer = make_tracer(settings, self._metrics.__getitem__)
        guard = make_guard(settings)
        unfinished, unread = held_bytes(config.counted, config.number)
        predict = make_predict(
            self._front_side.models,
            settings,
            guard,
            None if self._tracer is None else self._tracer.recorder,
            self._metrics.__getitem__,
            config.limits,
            unfinished,
        )
        predict.slots = slots
        self._forwarder = Forwarder(config.forwarding_path, guard, predict)
        http = PredictProtocol.bound_to(predict, config.limits, unread)
        self._edge = http.connection_limits
        tls = None
        if settings.tls_certificate is not None:
            tls = server_context(settings.tls_certificate, settings.tls_key)
        self._config = server_config(self._forwarder, http, settings, tls, lifespan="off")
        self._server = _Server(self._config)

    async def run(self) -> None:
        """Serve until asked to leave."""
        gc.freeze()  # later collections need not walk through the modules
        self._config.load()
        self._channel.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._take_connections)
        if self._tracer is not None:
            self._tracer.start()
        self._front_side.link.send(Listening())
        await self._server.serve(sockets=[])
        loop.remove_reader(self._channel.fileno())
        await self._forwarder.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.stop)
        self._count(CountRequest(0, logging.getLogger().level))
        self._front_side.link.flush()

    def _obey(self, command: Command) -> None:
        match command:
            case CountRequest():
                self._count(command)
            case MoveAway():
                self._moving = asyncio.create_task(self._move_away(), name="move away")
            case Leave():
                self._server.flush_until = command.flush_until
                self._server.should_exit = True
                self._server.force_exit = self._server.force_exit or command.is_hurried

    def _count(self, command: CountRequest) -> None:
        logging.getLogger().setLevel(command.log_level)
        calls, durations, exemplars = [], [], []
        for label, metrics in list(self._metrics.items()):
            if not metrics.requests:
                if label not in self._front_side.models:
                    del self._metrics[label]  # of a model that was removed, and nothing calls
                continue
            calls += [(label, status, num) for status, num in metrics.requests.items()]
            metrics.requests.clear()
            durations.append((label, metrics.answer_duration.take(), metrics.error_duration.take()))
            exemplars.append((label, metrics.exemplars.take()))
        num_open = len(self._server.server_state.connections)
        traced = (0, 0) if self._tracer is None else self._tracer.take_counts()
        counts = FrontCounts(
            command.id,
            calls,
            durations,
            exemplars,
            self._front_side.take_rejected(),
            self._num_taken,
            num_open,
            self._edge.use(),
            traced,
        )
        self._front_side.link.send(counts)

    async def _move_away(self) -> None:
        self._take_connections()
        await self._server.move_clients_away()
        self._front_side.link.send(MovedAway())

    def _take_connections(self) -> None:
        for _ in range(_MAX_TAKEN):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left for it
                logger.warning("a connection could not be taken: %s", error)
                self._num_taken += 1
                return
            if not data:
                return  # the main process has ended
            self._num_taken += 1
            for descriptor in descriptors:
                self._server.take(socket.socket(self._family, socket.SOCK_STREAM, 0, descriptor))

    def _send_line(self, line: LogLine) -> None:
        """Send a log line to the main process, from any thread."""
        if threading.get_ident() == self._thread:
            self._front_side.link.send(line)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._front_side.loop.call_soon_threadsafe(self._front_side.link.send, line)

    def _send_logs_to_main(self, level: int) -> None:
        root = logging.getLogger()
        root.handlers = [LineHandler(self._send_line)]
        root.setLevel(level)
        logging.captureWarnings(True)


def _end(reason: str) -> None:
    """End without the main process: the kernel or a thread is about to do so in any case."""
    os._exit(1)
