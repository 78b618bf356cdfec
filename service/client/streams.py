"""Reads answers that come in parts, as server-sent events (HTML standard, 9.2)."""

import json
from collections.abc import Iterator, Mapping

import httpx

from .errors import ConnectError, InferpoolError, ProtocolError
from .results import Json, Reply
from .retries import refusal_of

EVENTS_TYPE = "text/event-stream"
_PROBLEM_TYPE = "application/problem+json"


class PartReader:
    """Reads the parts of one instance's answer, in the pieces in which it comes."""

    def __init__(self, reply: Reply, request_id: str, place: str) -> None:
        """Begin with the head of an answer; `place` is the URL of the service.

        Raises:
            ProtocolError: It is no stream.
        """
        kind = reply.headers.get("content-type", "")
        if not kind.startswith(EVENTS_TYPE):
            raise ProtocolError(
                f"an answer of type {kind[:80]!r} is no stream", request_id=request_id
            )
        self.request_id = reply.headers.get("x-request-id", request_id)
        self.num_parts = 0
        self._place = place
        self._rest = b""
        self._is_over = False

    def read(self, piece: bytes) -> Iterator[Json]:
        """Yield the parts that are whole with one more piece.

        Raises:
            InferpoolError: The stream ends with an error, or is none of inferpool's.
        """
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            try:
                lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if line)
                name, data = lines[b"event"], json.loads(lines[b"data"])
                part = data["part"] if name == b"part" else None
            except (ValueError, KeyError, TypeError, RecursionError):
                start = event[:200].decode("utf-8", "replace")
                raise ProtocolError(
                    f"this is no event of inferpool's: {start!r}", request_id=self.request_id
                ) from None
            if name == b"part":
                self.num_parts += 1
                yield part
            elif name == b"error":
                raise self._error_in(data, lines[b"data"])
            elif name == b"done":
                self._is_over = True

    def check_end(self) -> None:
        """Check that the answer is whole, now that it has ended.

        Raises:
            ConnectError: It broke off.
        """
        if not self._is_over:
            raise self.broken("the connection was closed")

    def broken(self, message: str) -> InferpoolError:
        """Return the error of a stream that ended on its way."""
        return ConnectError(
            f"the stream from {self._place} broke after {self.num_parts} parts: {message}",
            request_id=self.request_id,
            is_retryable=False,
        )

    def _error_in(self, problem: Mapping[str, Json], content: bytes) -> InferpoolError:
        status = problem.get("status")
        headers = httpx.Headers({"content-type": _PROBLEM_TYPE})
        return refusal_of(
            Reply(
                status=status if isinstance(status, int) else 500, headers=headers, content=content
            ),
            self.request_id,
        )
