"""Messages between the front end and a worker. Each is one msgpack value.

Both sides decode by type with msgspec, never with pickle: bytes of a worker cause nothing worse in
the front end than one of the errors in `UNREADABLE`.
"""

import struct
from typing import Literal

import msgspec

from inferpool.models.files.opened import FileMark
from inferpool.models.spec import (
    USUAL_INTERFACE,
    Interface,
    Kind,
    RankPart,
    SplitReport,
    TensorHeader,
    TensorSpec,
)
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.shared.config import CheckReport

MAX_DESCRIPTORS = 250
"""Most descriptors for one process; the kernel passes 253 at once (SCM_MAX_FD)."""
FORKED = struct.Struct("q")
"""Answer of the forkserver: the number of the new process, or a negative errno."""
ID_FIELDS = ("request_id", "trace_id", "span_id")
"""Fields of log lines about a call."""


class ItemRef(msgspec.Struct, array_like=True, gc=False):
    """One instance: its options, and the place of its payload in the arena.

    It is made when the head of the call has arrived, and completed when the body is in a slot of
    the arena. It goes to the worker as it is, and nobody changes it after that.
    """

    kind: Kind
    offset: int
    num_bytes: int
    deadline: float
    """CLOCK_MONOTONIC seconds; after it the instance is not computed any more."""
    wants_tensors: bool = False
    """Answer with tensors rather than with rendered JSON."""
    headers: tuple[TensorHeader, ...] = ()
    parameters: bytes = b""
    """A JSON object, or empty."""
    request_id: str = ""
    """Id of the HTTP call, for the log."""
    trace: str = ""
    """Trace id, a hyphen and span id, for the log; empty if the call is not traced."""
    priority: int = 5
    """Priority from 1 (first) to 9 (last). The worker ignores it."""
    caller: int = 0
    """Number of the API key that it was asked with, from 1; 0 if keys are not told apart. The
    worker ignores it."""
    wants_content: bool = False
    """Prefer `render_content` over `render`, where the model has both."""

    def log_ids(self) -> dict[str, str]:
        """Return the fields that log lines about it are found by."""
        trace_id, _, span_id = self.trace.partition("-")
        found = (self.request_id, trace_id, span_id)
        return {name: value for name, value in zip(ID_FIELDS, found, strict=True) if value}


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch", gc=False):
    """Front end to worker: compute these instances together.

    A batch without items is a canary: compute a sample of the model.
    """

    id: int
    items: list[ItemRef]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop", gc=False):
    """Front end to worker: nobody waits for some streams of a batch any more."""

    id: int
    indices: list[int]
    """Their places in the batch."""


class Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place of an output in the region of its worker: see `workers.shared.outputs`."""

    first_block: int
    num_bytes: int


class TensorBlob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One output tensor of one instance: row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | Stored
    is_ragged: bool = False
    """The output is a list: it is never stacked with those of other instances."""

    @property
    def buffer(self) -> bytes:
        """Bytes of the tensor, or a view of them in the region."""
        assert not isinstance(self.data, Stored), "an output was not looked up in its region"
        return self.data


class ContentBlob(msgspec.Struct, frozen=True, tag="content"):
    """A model's `Content`, in the place of JSON."""

    media_type: str
    data: bytes | Stored
    headers: dict[str, str] = {}

    @property
    def buffer(self) -> bytes:
        """Its bytes, or a view of them in the region."""
        assert not isinstance(self.data, Stored), "content was not looked up in its region"
        return self.data


class ItemError(msgspec.Struct, frozen=True, tag="error", gc=False):
    """Why one instance of a batch has no prediction.

    An "unfit_input" made the model's `preprocess` raise; clients see it as "invalid_input".
    """

    code: Literal[
        "invalid_input",
        "unfit_input",
        "model_error",
        "non_finite_output",
        "deadline_exceeded",
        "exhausted",
        "worker_crashed",
    ]
    message: str


Outcome = bytes | list[TensorBlob] | ContentBlob | ItemError
"""Result of one instance: rendered JSON, tensors, content of its own kind, or an error."""


class BatchDone(msgspec.Struct, frozen=True, array_like=True, tag="done", gc=False):
    """Worker to front end: the outcomes of a batch, in its order.

    For a canary there is no outcome if it succeeded, else one error.
    """

    id: int
    outcomes: list[Outcome]
    prepare_s: float
    compute_s: float
    """Time of computation, without waits for other batches of a pipeline."""
    num_stored: int = 0
    """Outputs stored in the worker's region since the last answer, by this batch and others."""
    prepare_began: float = 0.0
    """CLOCK_MONOTONIC seconds."""
    compute_began: float = 0.0
    """Its end minus `compute_s`, in CLOCK_MONOTONIC seconds; waits would make it earlier."""


class StreamPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of one stream, or its end."""

    id: int
    """The batch that the stream came with."""
    index: int
    """Its place in the batch."""
    value: bytes | ItemError | None
    """JSON; or the error that the stream ended with; None if it is over."""


class StreamParts(msgspec.Struct, frozen=True, array_like=True, tag="parts", gc=False):
    """Worker to front end: the parts of one step, of all streams that are under way.

    After the last of its streams, a batch is answered by `BatchDone`, whose outcomes are empty.
    """

    parts: list[StreamPart]


class StartProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Worker to front end, while it loads: the present step, for people."""

    stage: str


MORE_AHEAD = 2
"""Batches beyond its credit that a worker holds if it runs ahead of its device."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Worker to front end, once: the model is loaded and warm; send a canary."""

    pid: int
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    device: str
    """Kind of device: "NVIDIA H100 80GB HBM3", "cpu"."""
    load_s: float
    """Time of loading, without the choice of a speed preset, which a restart does not repeat."""
    warmup_s: float | None
    """Time of the longest batch of the warm-up and its preparation; None without warm-up."""
    preloaded: bool
    """True if it was forked from a forkserver that had torch in memory already."""
    speed: SpeedReport
    """Speed preset that it serves with."""
    part: RankPart | None = None
    """Part of the model that the lead holds, if it is split."""
    split: SplitReport | None = None
    """How it is split, if it is."""
    example: bytes = b""
    """An example of an instance, as JSON; empty if there is none."""
    reads_own_form: bool = False
    """True if its `preprocess` reads another form than `inputs` describe."""
    checked: CheckReport = CheckReport()
    """Findings of the check of the model, by this worker or by another one."""
    files: list[FileMark] = []
    """Files that its model has loaded."""
    is_accelerated: bool = False
    """True if it computes on an accelerator rather than on a CPU."""
    num_ahead: int = 0
    """Batches that it may hold beyond its credit."""
    plans: dict[str, bytes] = {}
    """Needs of its parts on the host, by their names; a part that is left out has none."""
    interface: Interface = USUAL_INTERFACE


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="rank ready"):
    """A follower to the front end, once: its part is loaded, and it waits for its lead's calls."""

    device: str
    """Kind of device, like `Ready.device`."""
    part: RankPart
    """Part of the model that it holds."""
    files: list[FileMark] = []
    """Files that it has loaded."""


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Worker to front end, once, instead of `Ready`."""

    message: str
    permanent: bool
    traceback: str = ""
    """Traceback of an unexpected error; else empty."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Worker to front end: why it is about to exit by itself."""

    cause: Literal["device", "exit"]
    reason: str


class LogLine(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """Worker to front end: a record for the log."""

    level: int
    logger: str
    text: str
    ids: dict[str, str] = {}
    """Ids of the call that it is about: some of `ID_FIELDS`."""
    traceback: str = ""


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""Errors that msgspec raises for bytes that are no message."""

ToWorker = Batch | Drop | None
FromWorker = (
    BatchDone | StreamParts | Leaving | LogLine | StartProgress | RankReady | Ready | StartFailed
)
