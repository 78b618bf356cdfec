"""Reads inputs ahead in processes of their own, and decodes them where the model does not.

The readers are those of a torch `DataLoader`, forked by a forkserver. What the inputs of a chunk
hold lies in one piece of shared memory, from which the pool copies it once, into the arena that its
workers read. A reader that dies, because of a picture or for want of memory, takes nothing with it:
this process reads what it had, and leaves the decoding to the workers, which are watched.
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
from inferpool.service.batch.inputs import BatchInput
from inferpool.service.batch.sources import BatchSource
from inferpool.workers.inside.allocator import keep_large_buffers
from inferpool.workers.shared.guard import die_with_front_end, give_way_for_memory

logger = logging.getLogger(__name__)

_PREFETCHED = 4
"""Chunks that each reader holds ready."""
_CHUNK_BYTES = 1 << 26
"""Most shared memory of a chunk. Pictures that have no room in it are left as they are."""
_SHARED_FOLDER = "/dev/shm"
_LEAST_SHARED_BYTES = 1024
"""Smaller payloads go with the message: texts and rows of numbers, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedInput:
    """An input as a reader gives it."""

    input: BatchInput
    """Without its data, if there is a payload."""
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
        num_readers: Processes that read; 0: this thread does.
        chunk: Inputs that come at once.
        room: Inputs that the caller holds at a time.
        max_pixels: Turn pictures of so many pixels at most into pixels, and refuse larger ones;
            None: leave pictures as they are.
        max_chunk_bytes: The most shared memory that a chunk takes.
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
        except (RuntimeError, OSError, EOFError) as error:  # what a lost process makes torch raise
            if not num_readers:
                raise
            logger.warning("a reader was lost, and this process reads what it had: %s", error)
        for first in range(at, min(at + num_ahead, len(indices)), chunk):
            suspects = indices[first : first + chunk]
            at += len(suspects)
            yield [careful.given(index)[0] for index in suspects]


def end_readers() -> None:
    """Kill all readers. One that hangs would hold up who waits for what it reads."""
    for process in active_children():
        if isinstance(process, ForkServerProcess):
            process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedChunk:
    inputs: Sequence[DecodedInput | int]
    """Inputs without their payloads; the index of one that had no room in shared memory."""
    places: Sequence[tuple[int, int] | None]
    """The beginning and the end of the payload of each; None if it has none."""
    memory: Tensor

    def unpacked(self, reader: "_Readable") -> list[DecodedInput]:
        """Return the inputs; `reader` reads what had no room.

        Its bytes could be in the message. But a reader that is killed halfway through a long one
        would leave its end open for ever.
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
        """Read and decode a chunk; an input that cannot be has an error."""
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
        """Read an input; return the pixels of a picture apart, if there is room for them."""
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
        except (_NoRoomError, MemoryError, OSError):  # a refusal only in form
            pass  # a worker decodes it, and says if it has no memory either
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
        InputError: They cannot be read, or no tensor can have them.
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
    """Return how much shared memory a chunk may take, if there are so many.

    To write more than there is would kill a reader. A container has 64 MiB unless told otherwise.
    """
    try:
        free = shutil.disk_usage(_SHARED_FOLDER).free
    except OSError:
        return most_bytes
    return min(most_bytes, free // 2 // num_chunks)


def _begin(_: int) -> None:
    """Prepare a reader: it ends with the run, however that ends, and not by Ctrl-C before it."""
    die_with_front_end()
    give_way_for_memory()
    keep_large_buffers()
    warnings.filterwarnings("ignore", module="PIL")  # about damaged pictures, amid the bar


def _as_it_is(chunk: Any) -> Any:  # what `__getitems__` returns, where torch expects a list
    return chunk
