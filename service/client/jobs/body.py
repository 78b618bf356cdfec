"""The body of a job with many inputs; they are drawn and written as JSON while it is sent."""

import contextlib
import tempfile
import time
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import IO, TypeVar

import httpx

from ..bodies import file_question, json_line, names_file
from ..errors import UnsendableError

_T = TypeVar("_T")

_PIECE_BYTES = 1 << 16
_IN_MEMORY_BYTES = 1 << 20
"""Larger bodies that must be stored are in a temporary file."""


class JobBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Body of many inputs, one a line of JSON. It can be iterated over again, for a retry.

    Inputs that can be drawn only once, such as a generator's, are stored in a temporary file.
    """

    def __init__(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        query: Mapping[str, str],
        *,
        is_repeatable: bool = True,
        piece_s: float,
    ) -> None:
        """Store the inputs without drawing them.

        Args:
            inputs: One instance each.
            query: The query to send along.
            is_repeatable: True if the body may be sent again.
            piece_s: Seconds after which even a short piece is sent.
        """
        self.query = dict(query)
        self.headers = {"Content-Type": "application/jsonl", "Transfer-Encoding": "chunked"}
        self._inputs = inputs
        self._piece_s = piece_s
        self._kept: IO[bytes] | None = None
        self._rest: Iterator[bytes] | AsyncIterator[bytes] = iter(())
        """Pieces that are not drawn yet, if they are stored."""
        if isinstance(inputs, AsyncIterable):
            if is_repeatable and aiter(inputs) is inputs:
                self._rest = _async_pieces(inputs, piece_s)
                self._kept = _file()
        elif is_repeatable and iter(inputs) is inputs:
            self._rest = _pieces(inputs, piece_s)
            self._kept = _file()

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces.

        Raises:
            UnsendableError: An input cannot be sent; its `index` says which.
        """
        if isinstance(self._inputs, AsyncIterable):
            raise UnsendableError("these inputs come from an async iterable: use AsyncClient")
        if self._kept is None:
            yield from _pieces(self._inputs, self._piece_s)
            return
        yield from self._read()
        assert isinstance(self._rest, Iterator)
        for piece in self._rest:
            self._keep(piece)
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces; see `__iter__`."""
        if self._kept is None:
            async for piece in _async_pieces(self._inputs, self._piece_s):
                yield piece
            return
        for piece in self._read():
            yield piece
        async for piece in each_of(self._rest):
            self._keep(piece)
            yield piece

    def draw(self) -> None:
        """Draw the rest of the inputs, after a slow input has ended the last attempt."""
        assert isinstance(self._rest, Iterator)
        for piece in self._rest:
            self._keep(piece)

    async def draw_async(self) -> None:
        """Draw the rest of the inputs; see `draw`."""
        async for piece in each_of(self._rest):
            self._keep(piece)

    def close(self) -> None:
        """Delete the stored pieces."""
        if self._kept is not None:
            self._kept.close()

    def _keep(self, piece: bytes) -> None:
        assert self._kept is not None
        try:
            self._kept.write(piece)
        except OSError as error:
            raise UnsendableError(
                f"the inputs cannot be kept for a retry in {tempfile.gettempdir()}: {error}; pass "
                "a list or a .jsonl file, or use a client with retries=0"
            ) from error

    def _read(self) -> Iterator[bytes]:
        """Yield the stored pieces; the file is at its end then."""
        assert self._kept is not None
        self._kept.seek(0)
        while piece := self._kept.read(_PIECE_BYTES):
            yield piece


async def each_of(values: Iterable[_T] | AsyncIterable[_T]) -> AsyncIterator[_T]:
    """Yield each value of an iterable of either kind."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


class _Packer:
    """Joins lines to pieces."""

    def __init__(self, piece_s: float) -> None:
        self._piece_s = piece_s
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_lines = 0
        self._since = time.monotonic()

    def add(self, value: object) -> bytes:
        """Add an input; return a piece if one is full."""
        if not self._num_lines and isinstance(value, str) and names_file(value):
            warnings.warn(file_question(value), stacklevel=2)
        try:
            line = json_line(value)
        except UnsendableError as error:
            error.index = self._num_lines
            error.detail = f"input {self._num_lines}: {error.detail}"
            raise
        self._num_lines += 1
        self._lines.append(line)
        self._num_bytes += len(line)
        is_late = time.monotonic() - self._since > self._piece_s
        return self.take() if is_late or self._num_bytes >= _PIECE_BYTES else b""

    def take(self) -> bytes:
        """Return the lines so far as a piece."""
        piece = b"".join(self._lines)
        self._lines.clear()
        self._num_bytes = 0
        self._since = time.monotonic()
        return piece


def _pieces(inputs: Iterable[object], piece_s: float) -> Iterator[bytes]:
    packer = _Packer(piece_s)
    with _catch_request_errors():
        for value in inputs:
            if piece := packer.add(value):
                yield piece
    if piece := packer.take():
        yield piece


async def _async_pieces(
    inputs: Iterable[object] | AsyncIterable[object], piece_s: float
) -> AsyncIterator[bytes]:
    packer = _Packer(piece_s)
    with _catch_request_errors():
        async for value in each_of(inputs):
            if piece := packer.add(value):
                yield piece
    if piece := packer.take():
        yield piece


@contextlib.contextmanager
def _catch_request_errors() -> Iterator[None]:
    """Separate errors of httpx in the caller's code from those of our request.

    Otherwise the request would be sent again, and the inputs would seem to end at the error.
    """
    try:
        yield
    except httpx.RequestError as error:
        raise UnsendableError(f"an input cannot be drawn: {error!r}") from error


def _file() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)
