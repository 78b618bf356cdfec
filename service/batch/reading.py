"""Reads inputs ahead in separate processes, and decodes them if the model does not.

The readers are those of a torch `DataLoader`, forked by a forkserver. The payloads of a chunk lie
in one piece of shared memory. The pool copies them once, into the arena that its workers read. If a
reader dies, because of a picture or for lack of memory, no input is lost: this process reads its
inputs, and leaves the decoding to the supervised workers.
"""

import io
import logging
import shutil
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from inferpool.models.errors import InputError
from inferpool.models.spec import DTYPE_BYTES, TensorHeader
from inferpool.models.vision.images import decode_image
from inferpool.service.batch.inputs import BatchAnswer, BatchInput
from inferpool.service.batch.sources import BatchSource
from inferpool.workers.inside.allocator import keep_large_buffers
from inferpool.workers.shared.guard import die_with_front_end, give_way_for_memory

logger = logging.getLogger(__name__)

_PREFETCHED = 4
"""Chunks that each reader holds ready."""
_CHUNK_BYTES = 1 << 26
"""Most shared memory of a chunk. Pictures without room in it are not decoded."""
_SHARED_FOLDER = "/dev/shm"
_LEAST_SHARED_BYTES = 1024
"""Smaller payloads go with the message, for example texts and rows of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedInput:
    """An input from a reader."""

    input: BatchInput
    """The input, without its data if there is a payload."""
    payload: Tensor | None = None
    """Its bytes, uint8 [bytes], in shared memory."""
    header: TensorHeader | None = None
    """The tensor in the payload: pixels, or the numbers of an .npy file; None for a file's bytes.
    It has no name."""

    @property
    def data(self) -> bytes | memoryview:
        """The bytes to send."""
        if self.payload is None:
            return self.input.data
        return self.payload.numpy().data if self.payload.numel() else b""

    def answered(self, prediction: object) -> BatchAnswer:
        """Return the answer with its prediction."""
        own = self.input
        return BatchAnswer(index=own.index, name=own.name, label=own.label, prediction=prediction)

    def refused(self, code: str, message: str) -> BatchAnswer:
        """Return the answer for an input that has no prediction."""
        own = self.input
        return BatchAnswer(
            index=own.index, name=own.name, label=own.label, code=code, message=message
        )


def read_ahead(
    source: BatchSource,
    indices: Sequence[int],
    *,
    num_readers: int,
    chunk: int,
    room: int,
    max_pixels: int | None,
    max_chunk_bytes: int = _CHUNK_BYTES,
) -> Generator[Sequence[DecodedInput], None, None]:
    """Yield the inputs at some indices in chunks, in order.

    Args:
        source: The inputs.
        indices: The ones to read.
        num_readers: Processes that read; 0: this thread reads.
        chunk: Inputs of a chunk.
        room: Inputs that the caller holds at the same time.
        max_pixels: Decode pictures up to this number of pixels, and refuse larger ones; None:
            decode none.
        max_chunk_bytes: The most shared memory of a chunk.
    """
    several: Mapping[str, object] = {}
    num_ahead = num_readers * _PREFETCHED * chunk
    if num_readers:
        several = {
            "multiprocessing_context": get_context("forkserver"),
            "prefetch_factor": _PREFETCHED,
            "worker_init_fn": _begin,
        }
    most_bytes = _room_for_chunk((num_ahead + room) // chunk + 2, max_chunk_bytes)
    readable = _Readable(source, max_pixels=max_pixels, most_bytes=most_bytes)
    careful = _Readable(source, max_pixels=None)
    at = 0
    while at < len(indices):
        try:
            for packed in DataLoader(
                readable,
                batch_size=chunk,
                sampler=indices[at:],
                num_workers=num_readers,
                collate_fn=_as_it_is,
                **several,  # type: ignore[arg-type]  # mypy takes them for one type
            ):
                at += len(packed.inputs)
                yield packed.unpacked(careful)
        except (RuntimeError, OSError, EOFError) as error:  # torch raises them for a lost process
            if not num_readers:
                raise
            logger.warning("a reader was lost, and this process reads what it had: %s", error)
        for first in range(at, min(at + num_ahead, len(indices)), chunk):
            suspects = indices[first : first + chunk]
            at += len(suspects)
            yield [careful.given(index)[0] for index in suspects]


def end_readers() -> None:
    """Kill all readers. A hanging one would block the thread that waits for it."""
    for process in active_children():
        if isinstance(process, ForkServerProcess):
            process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedChunk:
    inputs: Sequence[DecodedInput | int]
    """Inputs without their payloads; an index for an input without room in shared memory."""
    places: Sequence[tuple[int, int] | None]
    """The beginning and the end of the payload of each; None if it has none."""
    memory: Tensor

    def unpacked(self, reader: "_Readable") -> list[DecodedInput]:
        """Return the inputs; `reader` reads those without room.

        Their bytes are not in the message: a reader that is killed in the middle of a long message
        would never end it.
        """
        found = []
        for given, place in zip(self.inputs, self.places, strict=True):
            if isinstance(given, int):
                found.append(reader.given(given)[0])
            elif place is None:
                found.append(given)
            else:
                found.append(replace(given, payload=self.memory[place[0] : place[1]]))
        return found


class _Readable(Dataset[BatchInput]):
    def __init__(
        self, source: BatchSource, *, max_pixels: int | None, most_bytes: int = _CHUNK_BYTES
    ) -> None:
        self._source = source
        self._max_pixels = max_pixels
        self._most_bytes = most_bytes

    def __getitems__(self, indices: Sequence[int]) -> _PackedChunk:
        """Read and decode a chunk; an unreadable input has an error."""
        inputs: list[DecodedInput | int] = []
        places: list[tuple[int, int] | None] = []
        pieces: list[NDArray[np.uint8]] = []
        end = 0
        for index in indices:
            room = self._most_bytes - end
            given, pixels = self.given(index, room)
            data = np.frombuffer(given.input.data, np.uint8) if pixels is None else pixels
            if pixels is None and data.size < _LEAST_SHARED_BYTES:
                places.append(None)
                inputs.append(given)
            elif data.size > room:
                places.append(None)
                inputs.append(index)
            else:
                places.append((end, end + data.size))
                pieces.append(data)
                end += data.size
                inputs.append(replace(given, input=replace(given.input, data=b"")))
        memory = torch.empty(end, dtype=torch.uint8)
        if get_worker_info() is not None:
            memory.share_memory_()
        if pieces:
            np.concatenate(pieces, out=memory.numpy())
        return _PackedChunk(inputs=inputs, places=places, memory=memory)

    def given(self, index: int, room: int = 0) -> tuple[DecodedInput, NDArray[np.uint8] | None]:
        """Read an input; return a picture's pixels separately, if there is room for them."""
        found = self._source.read(index)
        try:
            if found.kind == "npy" and not found.error:
                return _from_npy(found), None
            if found.kind == "image" and not found.error and self._max_pixels is not None:
                check = partial(_check_room, room=room)
                image = decode_image(found.data, max_pixels=self._max_pixels, check=check)
                header = TensorHeader("", "uint8", (image.height, image.width, 3), 0)
                given = DecodedInput(input=replace(found, data=b""), header=header)
                return given, np.asarray(image).reshape(-1)
        except (_NoRoomError, MemoryError, OSError):  # it is not refused
            pass  # a worker decodes it, or reports that it lacks memory too
        except InputError as error:
            refused = replace(found, data=b"", error=str(error), code="invalid_input")
            return DecodedInput(input=refused), None
        return DecodedInput(input=found), None


class _NoRoomError(InputError):
    """The pixels of a picture have no room in their chunk."""


def _check_room(size: tuple[int, int], *, room: int) -> None:
    if size[0] * size[1] * 3 > room:
        raise _NoRoomError


def _from_npy(found: BatchInput) -> DecodedInput:
    """Read the numbers of an .npy file.

    Raises:
        InputError: They cannot be read, or do not fit into a tensor.
    """
    try:
        array = np.load(io.BytesIO(found.data), allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError, MemoryError) as error:
        raise InputError(f"it is no file of numpy: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.name not in DTYPE_BYTES:
        raise InputError(f"no tensor has values of type {getattr(array, 'dtype', 'npz')}")
    header = TensorHeader("", array.dtype.name, array.shape, 0)
    data = array.astype(array.dtype.newbyteorder("<"), "C", copy=False).tobytes()
    return DecodedInput(input=replace(found, data=data), header=header)


def _room_for_chunk(num_chunks: int, most_bytes: int) -> int:
    """Return how much shared memory each of `num_chunks` chunks may take.

    Writing more than there is would kill a reader. By default a container has 64 MiB.
    """
    try:
        free = shutil.disk_usage(_SHARED_FOLDER).free
    except OSError:
        return most_bytes
    return min(most_bytes, free // 2 // num_chunks)


def _begin(_: int) -> None:
    """Prepare a reader: it ends with the run, in any case, and ignores Ctrl-C."""
    die_with_front_end()
    give_way_for_memory()
    keep_large_buffers()
    warnings.filterwarnings("ignore", module="PIL")  # about damaged pictures, amid the bar


def _as_it_is(chunk: Any) -> Any:  # from `__getitems__`; torch expects a list
    return chunk
