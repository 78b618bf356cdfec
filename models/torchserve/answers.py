"""Answers of handlers, in the forms that protocols and clients get. Runs in worker processes only.

A protocol asks with the parameter `envelope`: the answer is then a `Content` of `MEDIA_TYPE`, with
a head and the bytes that TorchServe would send.
"""

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, overload

import msgspec
import torch
from torch import Tensor

from inferpool.models.content import Content, bare_type, type_fault
from inferpool.models.errors import InputError
from inferpool.models.json_errors import JsonErrors
from inferpool.models.ragged import RaggedOutput
from inferpool.models.texts import text_of

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/vnd.inferpool.handler-answer"
"""Content that has 4 bytes with the length of a head (little-endian), the head as JSON, and the
body."""
_OCTETS = "application/octet-stream"
_MAX_TEXT_CHARS = 1000


class HandlerStatusError(RuntimeError):
    """A handler has set a status that says that it failed, for a call that shows no status."""


class UnsupportedAnswer:
    """The place of an answer that cannot be sent. JSON has no form for it, so that it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerAnswer:
    """The return value of a handler for one request, and what it has set for the answer."""

    value: object
    status: int = 200
    reason: str | None = None
    headers: Mapping[str, str]
    content_type: str | None = None
    error: str | None = None
    """The message of an error that the handler raised to answer with it; it has no value."""
    more: bool | None = None
    """Another part follows; None if the answer does not come in parts."""

    def content(self) -> Content | UnsupportedAnswer:
        """Return the answer for a protocol that asked for the envelope."""
        try:
            body = b"" if self.error is not None else _as_torchserve(self.value)
        except (TypeError, ValueError, RecursionError) as error:
            logger.warning("a handler's answer cannot be sent: %s", text_of(error))
            return UnsupportedAnswer()
        head: dict[str, object] = {
            "status": self.status,
            "reason": self.reason,
            "headers": [*self.headers.items()],
            "content_type": self.content_type,
        }
        if self.error is not None:
            head["error"] = self.error
        if self.more is not None:
            head["more"] = self.more
        text = msgspec.json.encode(head)
        return Content(b"".join((len(text).to_bytes(4, "little"), text, body)), MEDIA_TYPE)

    def plain(self) -> object:
        """Return the answer for any other call: a JSON value, or content.

        Raises:
            InputError: The handler has set a status that blames the client.
            HandlerStatusError: It has set one that blames itself.
        """
        self.check_status()
        value, media_type = self.value, self.content_type
        if isinstance(value, bytes | bytearray | memoryview):
            kind = "" if media_type is None or type_fault(media_type) else bare_type(media_type)
            if kind == "application/json":
                try:
                    return msgspec.json.decode(value)
                except JsonErrors:
                    kind = ""
            return Content(bytes(value), media_type if kind and media_type else _OCTETS)
        return value

    def check_status(self) -> None:
        """Check the status for a call that shows none to its client.

        Raises:
            InputError: The handler has set a status that blames the client.
            HandlerStatusError: It has set one that blames itself.
        """
        if self.status < 400:
            return
        said = self.error if self.error is not None else _text_of(self.value)
        text = f"the handler answered with status {self.status}: {said}"
        raise (InputError if self.status < 500 else HandlerStatusError)(text)


class HandlerAnswers(RaggedOutput):
    """Answers to a batch, in the place of an output: nothing but `render_batch` reads them."""

    @overload
    def __getitem__(self, rows: SupportsIndex) -> Tensor: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int]) -> "HandlerAnswers": ...
    def __getitem__(self, rows: SupportsIndex | slice | Sequence[int]) -> "Tensor | HandlerAnswers":
        """Return one answer, or several."""
        found = super().__getitem__(rows)
        return HandlerAnswers(found) if isinstance(found, list) else found

    def cpu(self) -> "HandlerAnswers":
        """Return the answers, which lie on the CPU."""
        return self


def _as_torchserve(value: object) -> bytes | bytearray:
    """Return the bytes that TorchServe sends for a value (`ts/protocol/otf_message_handler.py`).

    Raises:
        TypeError: It sends no such value.
        ValueError: Text in it is no Unicode, or it contains itself.
    """
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Tensor):
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()
    return json.dumps(value, indent=2).encode()


def _text_of(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[:_MAX_TEXT_CHARS]).decode(errors="replace")
    return str(value)[:_MAX_TEXT_CHARS]
