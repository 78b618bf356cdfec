"""Messages between the front end and the agent of a host, and how they lie in a TCP stream.

A frame is the length of its head (unsigned 32 bits), the length of its body (unsigned 64 bits),
both big-endian, then the head and the body. The head is one msgpack value, decoded by type with
msgspec and never with pickle. The body has the payloads of a batch or its large outputs, one after
the other.
"""

import struct
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import Ending, ForkserverHealth, GpuHealth, Vitals, WorkerId
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.messages import (
    BatchDone,
    ContentBlob,
    Drop,
    ItemRef,
    Outcome,
    Ready,
    Stored,
    StreamPart,
    TensorBlob,
)
from inferpool.workers.shared.queues import MAX_FRAME_BYTES

PROTOCOL = 3
"""Number of this set of messages. Both sides must have the same."""
LENGTHS = struct.Struct("!IQ")
MAX_HEAD_BYTES = 64 << 20
"""Largest head. A batch takes some 100 bytes an instance, and its parameters."""
MAX_STRANGER_BYTES = 1 << 18
"""Largest head of an agent that has not proved that it knows the key."""
MAX_BODY_BYTES = MAX_FRAME_BYTES
"""Largest body."""
MAX_MEASURED_BYTES = 64 << 20
"""Largest body of `Measure` and of its answer."""
_MIN_PLACED_BYTES = 1 << 12
"""Least size of an output to go into the body, where it need not be copied."""

Role = Literal["agent", "standby"]


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a host, which does not change while its agent runs."""

    name: str
    """Name of the host, unique among the hosts of a front end."""
    instance: str
    """Random id of the agent's process: with the same one it may replace its earlier connection."""
    pid: int
    version: str
    """Version of inferpool."""
    torch: str
    """Version of torch; empty if unknown."""
    python: str
    devices: Host


class HostVitals(msgspec.Struct, frozen=True, kw_only=True):
    """State of a host, as its agent sees it."""

    forkserver: ForkserverHealth | None = None
    arena_bytes: int = 0
    arena_used_bytes: int = 0
    wall_time: float = 0.0
    """Seconds of the Unix epoch by the clock of the host; 0.0 before its first report."""
    gpus: list[GpuHealth] = []


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """Front end to agent, first of all: prove that you know the key."""

    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Agent to front end: the answer to the challenge, and the facts of the host."""

    protocol: int
    role: Role
    nonce: bytes
    """Challenge to the front end, which must know the key too."""
    proof: bytes
    term: int
    """Largest term of a front end that it has worked for; 0 if it has worked for none."""
    facts: HostFacts


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Front end to agent: it is one of the hosts now."""

    proof: bytes
    term: int
    """Number of the front end's time of service: a later one is larger."""
    epoch: int
    """Number of this connection among those of the front end."""
    is_standing_by: bool = False
    """See `Beat`."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """Either side: why it does not work with the other one (any more). The connection ends then."""

    reason: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Front end to agent, twice a second: a sign of life, and a request for a pulse."""

    sent_at: float
    """Time of the front end's monotonic clock, for the pulse."""
    term: int = 0
    is_standing_by: bool = False
    """True if the front end accepts no agents now, since another one serves."""


class WorkerPulse(msgspec.Struct, frozen=True, array_like=True):
    """State of one worker, for the front end."""

    number: int
    is_stalled: bool
    vitals: Vitals


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """Agent to front end: the answer to a beat."""

    sent_at: float
    """Copied from the beat; 0.0 if none has come for a while, since payloads are on the way."""
    vitals: HostVitals
    workers: list[WorkerPulse]


class StartWorker(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Front end to agent: start a worker."""

    number: int
    """Number of the worker on this connection."""
    id: WorkerId
    config: WorkerConfig


class StopWorker(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Front end to agent: stop a worker, or give up its start."""

    number: int
    grace_s: float


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Agent to front end: the present step of a start, for people."""

    number: int
    stage: str


class WorkerStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Agent to front end: a worker accepts batches."""

    number: int
    credit: int
    ready: Ready


class WorkerNotStarted(msgspec.Struct, frozen=True, array_like=True, tag="not started"):
    """Agent to front end: a worker did not start."""

    number: int
    message: str
    permanent: bool
    traceback: str = ""


class WorkerEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Agent to front end: a worker has ended. It has answered for all batches that it held."""

    number: int
    ending: Ending


class RunBatch(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Front end to agent: compute a batch. The body has the payloads in the order of the items."""

    number: int
    id: int
    sent_at: float
    """Time of sending by the clock of the deadlines, so that the agent knows the time left."""
    items: Sequence[ItemRef]


class DropStreams(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Front end to agent: nobody waits for some streams of a batch any more."""

    number: int
    drop: Drop


class PartsSent(msgspec.Struct, frozen=True, array_like=True, tag="parts"):
    """Agent to front end: parts of the streams of a batch."""

    number: int
    parts: Sequence[StreamPart]


class BatchOutcomes(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Agent to front end: the outcomes of a batch, with large outputs in the body."""

    number: int
    done: BatchDone


class BatchLost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Agent to front end: a worker has ended, or had ended before, while it held a batch."""

    number: int
    id: int
    reason: str
    started: bool


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Front end to agent: receive the body, and send one back."""

    id: int
    num_bytes: int
    """Size of the body of the answer."""


class Measured(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """Agent to front end: the answer to `Measure`."""

    id: int


ToFrontEnd = (
    Hello
    | Refusal
    | Pulse
    | Progress
    | WorkerStarted
    | WorkerNotStarted
    | WorkerEnded
    | BatchOutcomes
    | PartsSent
    | BatchLost
    | Measured
)
ToAgent = (
    Challenge
    | Welcome
    | Refusal
    | Beat
    | StartWorker
    | StopWorker
    | RunBatch
    | DropStreams
    | Measure
)
Message = ToFrontEnd | ToAgent
Views = Sequence[memoryview]
_Blob = TypeVar("_Blob", TensorBlob, ContentBlob)

_encode = msgspec.msgpack.Encoder().encode


class FrameTooLargeError(ValueError):
    """A message is too large to be sent."""


def frame_start(message: Message, num_body_bytes: int) -> bytes:
    """Return all of a frame but its body.

    Raises:
        FrameTooLargeError: Its head or its body is larger than the other side accepts.
        Exception: The message cannot be encoded.
    """
    head = _encode(message)
    if len(head) > MAX_HEAD_BYTES:
        raise FrameTooLargeError(f"a message of {len(head)} bytes; {MAX_HEAD_BYTES} are allowed")
    if num_body_bytes > MAX_BODY_BYTES:
        raise FrameTooLargeError(f"a body of {num_body_bytes} bytes; {MAX_BODY_BYTES} are allowed")
    return LENGTHS.pack(len(head), num_body_bytes) + head


def placed(done: BatchDone, id: int, ahead_s: float) -> tuple[BatchDone, list[memoryview]]:
    """Move the large outputs of an answer into a body.

    Args:
        done: The answer of a worker.
        id: Number of the batch on the connection.
        ahead_s: How far the clock of the host is ahead of the front end's.

    Returns:
        The answer with the places of its outputs in the body, and the body in pieces.
    """
    pieces: list[memoryview] = []
    position = 0

    def placed_one(blob: _Blob) -> _Blob:
        nonlocal position
        data = memoryview(blob.buffer)
        if data.nbytes < _MIN_PLACED_BYTES:
            return replace(blob, data=bytes(data))
        pieces.append(data)
        position += data.nbytes
        return replace(blob, data=Stored(position - data.nbytes, data.nbytes))

    outcomes: list[Outcome] = []
    for outcome in done.outcomes:
        if isinstance(outcome, list):
            outcomes.append([placed_one(blob) for blob in outcome])
        elif isinstance(outcome, ContentBlob):
            outcomes.append(placed_one(outcome))
        else:
            outcomes.append(outcome)
    answer = replace(
        done,
        id=id,
        outcomes=outcomes,
        num_stored=0,
        prepare_began=done.prepare_began - ahead_s if done.prepare_began else 0.0,
        compute_began=done.compute_began - ahead_s if done.compute_began else 0.0,
    )
    return answer, pieces


def found(done: BatchDone, body: memoryview) -> BatchDone:
    """Replace the places of outputs in a body by views of it.

    Raises:
        ValueError: A place is outside of the body.
    """
    outcomes: list[Outcome] = []
    for outcome in done.outcomes:
        if isinstance(outcome, list):
            outcomes.append([_found(blob, body) for blob in outcome])
        elif isinstance(outcome, ContentBlob):
            outcomes.append(_found(outcome, body))
        else:
            outcomes.append(outcome)
    return replace(done, outcomes=outcomes)


def _found(blob: _Blob, body: memoryview) -> _Blob:
    if not isinstance(blob.data, Stored):
        return blob
    start, num_bytes = blob.data.first_block, blob.data.num_bytes
    if start < 0 or num_bytes < 0 or start + num_bytes > body.nbytes:
        raise ValueError(f"an output of {num_bytes} bytes at {start} of {body.nbytes}")
    return replace(blob, data=body[start : start + num_bytes])
