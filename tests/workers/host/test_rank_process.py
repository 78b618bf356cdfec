"""The view of one process: what it writes, whatever that is, and how it ends."""

import asyncio
import os
import subprocess

import msgspec
import pytest

from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.local_worker import RankProcess
from inferpool.workers.host.observed import OomKills
from inferpool.workers.shared.messages import BatchDone, FromWorker, LogLine
from inferpool.workers.shared.outputs import StoredError
from inferpool.workers.shared.queues import MAX_FRAME_BYTES, FrameError


class Sleeper:
    """A process that only sleeps, with multiprocessing's interface; the test writes for it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int:
        return self._process.returncode

    def join(self) -> None:
        self._process.wait()

    def close(self) -> None:
        os.close(self.sentinel)


class RecordingListener:
    """Keeps what a process says, but does not believe everything."""

    def __init__(self) -> None:
        self.messages: list[FromWorker] = []
        self.reasons: list[str] = []
        self.is_over = asyncio.Event()

    def on_message(self, rank: RankProcess, message: FromWorker) -> None:
        match message:
            case BatchDone(id=1):
                raise FrameError("no such batch")
            case BatchDone():
                raise StoredError("no such output")
        self.messages.append(message)

    def on_mute(self, rank: RankProcess, reason: str) -> None:
        self.reasons.append(reason)

    def on_exit(self, rank: RankProcess) -> None:
        self.is_over.set()


LINE = LogLine(20, "model", "words")


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def said(message: object) -> bytes:
    return framed(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "words",
    [
        framed(b"garbage"),
        framed(b""),
        said({"type": "LogLine"}),
        said(["NoSuchMessage", 1]),
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        said(BatchDone(1, [], 0.0, 0.0)),
        said(BatchDone(2, [], 0.0, 0.0)),
    ],
)
async def test_process_that_writes_what_makes_no_sense_is_heard_no_more_and_killed(
    words: bytes, caplog: pytest.LogCaptureFixture
):
    rank = RankProcess(WorkerId(model="m", slot=0), 0, OomKills(), is_alone=True)
    writer = os.dup(rank.outbox.writer.fileno())
    listener = RecordingListener()
    rank.attach(Sleeper(), listener)  # type: ignore[arg-type]  # all that is used of a process
    os.write(writer, said(LINE) + words + said(LINE))
    await listener.is_over.wait()
    assert listener.messages == [LINE]
    assert listener.reasons == ["wrote an invalid message"]
    assert rank.ending[0] == "signal"
    assert "m/0#0 wrote an invalid message" in caplog.text
    os.close(writer)
    rank.close()


async def test_process_that_closes_its_pipe_is_killed_if_it_does_not_exit():
    rank = RankProcess(WorkerId(model="m", slot=0), 0, OomKills(), is_alone=True)
    writer = os.dup(rank.outbox.writer.fileno())
    listener = RecordingListener()
    rank.attach(Sleeper(), listener)  # type: ignore[arg-type]  # as above
    os.write(writer, said(LINE))
    os.close(writer)
    await listener.is_over.wait()
    assert (listener.messages, listener.reasons) == ([LINE], [""])
    assert rank.ending[0] == "signal"
    rank.close()
