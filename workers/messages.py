"""What crosses between the front end and a worker, and how one message follows another in a pipe.

A batch is one msgpack value, and so is its answer. The framing is that of
multiprocessing.connection: a signed 32-bit length, big-endian, or -1 and an unsigned 64-bit one,
and then so many bytes.

Both sides are decoded by type with msgspec, never by pickle: a worker that writes rubbish makes
one of `UNREADABLE` in the front end and nothing else.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from inferpool.models.files.opened import FileMark
from inferpool.models.spec import TensorHeader, TensorSpec
from inferpool.models.speed.names import SpeedReport
from inferpool.models.split.report import RankPart, SplitReport

Kind = Literal["image", "bytes", "json", "tensors"]
"""As `models.item.Kind`, which the front end cannot import without torch."""

MAX_FRAME_BYTES = 1 << 30
ID_FIELDS = ("request_id", "trace_id", "span_id")
"""Of log lines about a call."""


class ItemRef(msgspec.Struct, array_like=True, gc=False):
    """One instance: what its call asks of it, and where its payload lies in the arena.

    It is made with the head of the call, completed with the body and with a slot of the arena, and
    goes to the worker as it is. Nobody changes it after that.
    """

    kind: Kind
    offset: int
    num_bytes: int
    deadline: float
    """CLOCK_MONOTONIC seconds; past it, the instance is not computed."""
    wants_tensors: bool = False
    """Answer with tensors rather than with rendered JSON."""
    headers: tuple[TensorHeader, ...] = ()
    parameters: bytes = b""
    """A JSON object, or nothing."""
    request_id: str = ""
    """Of the HTTP call, for the log."""
    trace: str = ""
    """For the log too: trace id, a hyphen and span id, where others know that trace."""
    priority: int = 5
    """1 goes first, 9 last. The worker does not look at it."""

    def log_ids(self) -> dict[str, str]:
        """By which a log line about it is found."""
        trace_id, _, span_id = self.trace.partition("-")
        found = (self.request_id, trace_id, span_id)
        return {name: value for name, value in zip(ID_FIELDS, found, strict=True) if value}


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Front end to worker: compute these together.

    Without items it is a canary: compute a sample of the model's own.
    """

    id: int
    items: list[ItemRef]


class Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an output lies in its worker's region: see `workers.outputs`."""

    first_block: int
    num_bytes: int


class TensorBlob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One output tensor of one instance: row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | Stored

    @property
    def buffer(self) -> bytes:
        """Its bytes, or a view of where they were found."""
        assert not isinstance(self.data, Stored), "an output was not looked up where it lies"
        return self.data


class ItemError(msgspec.Struct, frozen=True, gc=False):
    """Why one instance of a batch has no prediction."""

    code: Literal[
        "invalid_input", "model_error", "non_finite_output", "deadline_exceeded", "exhausted"
    ]
    message: str


Outcome = bytes | list[TensorBlob] | ItemError
"""Rendered JSON, or tensors, or an error."""


class BatchDone(msgspec.Struct, frozen=True, array_like=True, tag="done", gc=False):
    """Worker to front end: the outcomes of a batch, in its order.

    Of a canary there is none, or the error that it met with.
    """

    id: int
    outcomes: list[Outcome]
    prepare_s: float
    compute_s: float
    """Of its own: without the time in which it waited for other batches of a pipeline."""
    num_stored: int = 0
    """Outputs that lie in the worker's region; also those that others stored meanwhile."""
    prepare_began: float = 0.0
    """CLOCK_MONOTONIC seconds; so is the next."""
    compute_began: float = 0.0
    """`compute_s` before its end: where it waited for others in between, it began earlier."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Worker to front end, while it loads: what it is doing now, for a person to read."""

    stage: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Worker to front end, once: loaded and warm, send a canary."""

    pid: int
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    device: str
    """The device as a person knows it: "NVIDIA H100 80GB HBM3", "cpu"."""
    load_s: float
    """Without what it took to choose a speed preset, which a restart does not repeat."""
    warmup_s: float | None
    """What the longest batch of the warm-up took, with its preparation; None without a warm-up."""
    preloaded: bool
    """The process was forked from a server that had torch in memory already."""
    speed: SpeedReport
    """Which preset it serves with."""
    part: RankPart | None = None
    """What its lead holds, if it is split."""
    split: SplitReport | None = None
    """How it is split, if it is."""
    example: bytes = b""
    """An instance that it takes, as JSON; empty if it has none to show."""
    reads_own_form: bool = False
    """Its `preprocess` reads something else than `inputs` say."""
    files: list[FileMark] = []
    """What its model was made of."""


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="rank ready"):
    """A follower to the front end, once: its part is loaded, and it waits for its lead's calls."""

    device: str
    """As in `Ready`."""
    part: RankPart
    """What it holds."""


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Worker to front end, once, instead of `Ready`."""

    message: str
    permanent: bool
    traceback: str = ""
    """Of what was raised, if nothing that was foreseen."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Worker to front end, before it ends of its own accord: why."""

    cause: Literal["device", "exit"]
    reason: str


class LogLine(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """Worker to front end: a record of the worker's log."""

    level: int
    logger: str
    text: str
    ids: dict[str, str] = {}
    """Of the call that it is about: some of `ID_FIELDS`."""
    traceback: str = ""
    """Or nothing."""


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""All that msgspec raises on bytes that are no message; the second is none of its own."""

FromWorker = BatchDone | Leaving | LogLine | Progress | RankReady | Ready | StartFailed


class FrameError(Exception):
    """The other end wrote something that is no frame."""


class Frames:
    """Makes frames of what is read, and keeps what is half a frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The frames that are whole now, to be gone through at once.

        Raises:
            FrameError: A length is out of bounds.
        """
        if not self._buffer and len(data) >= 4 and int.from_bytes(data[:4], "big") == len(data) - 4:
            return (data[4:],)  # the usual case: exactly one frame
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            start, length = _parse_head(buffer)
            if length is None or len(buffer) < start + length:
                return
            frame = bytes(memoryview(buffer)[start : start + length])
            del buffer[: start + length]
            yield frame


def _parse_head(buffer: bytearray) -> tuple[int, int | None]:
    """Where the first frame's body starts, and its length if that has arrived."""
    (length,) = struct.unpack_from("!i", buffer)
    start = 4
    if length == -1:
        if len(buffer) < 12:
            return 12, None
        (length,) = struct.unpack_from("!Q", buffer, 4)
        start = 12
    if not 0 <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    return start, length
