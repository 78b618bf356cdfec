import asyncio
import contextlib
import os

import pytest

from inferpool.workers.host.local_worker import PrivateQueue
from inferpool.workers.shared.queues import FrameError, FrameReader, FrameWriter


def frames_of(reader: FrameReader) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        frames += reader.frames()
        if reader.is_dry:
            return frames


@pytest.fixture
def queue():
    queue = PrivateQueue()
    yield queue
    queue.close()


async def test_queues_understand_connections_of_the_standard_library(queue: PrivateQueue):
    reader = FrameReader(queue.reader)
    queue.writer.send_bytes(b"from a Connection")
    assert frames_of(reader) == [b"from a Connection"]

    other = PrivateQueue()
    assert FrameWriter(other.writer).write(b"to a Connection")
    assert other.reader.recv_bytes() == b"to a Connection"
    other.close()


def test_frames_before_the_end_of_file_are_read_first(queue: PrivateQueue):
    reader = FrameReader(queue.reader)
    queue.writer.send_bytes(b"last words")
    queue.writer.close()
    assert list(reader.frames()) == [b"last words"]
    with pytest.raises(EOFError):
        list(reader.frames())


def test_absurd_length_is_an_error(queue: PrivateQueue):
    reader = FrameReader(queue.reader)
    os.write(queue.writer.fileno(), (-5).to_bytes(4, "big", signed=True) + b"....")
    with pytest.raises(FrameError):
        list(reader.frames())


async def test_writer_keeps_data_that_does_not_fit_and_sends_it_later(queue: PrivateQueue):
    writer = FrameWriter(queue.writer)
    body = os.urandom(3 << 20)
    assert not writer.write(body)
    got = bytearray()
    os.set_blocking(queue.reader.fileno(), False)
    while len(got) < len(body) + 4:
        with contextlib.suppress(BlockingIOError):
            got += os.read(queue.reader.fileno(), 1 << 20)
        await asyncio.sleep(0)  # the writer finds that there is room
    assert bytes(got[4:]) == body
    writer.close()


async def test_writing_to_a_dead_reader_is_no_error(queue: PrivateQueue):
    queue.reader.close()
    assert FrameWriter(queue.writer).write(b"anyone?")
