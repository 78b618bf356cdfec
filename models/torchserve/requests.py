"""Reads instances as the requests that handlers get. Runs in worker processes only."""

import json
import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from inferpool.models.errors import InputError
from inferpool.models.item import Item

logger = logging.getLogger(__name__)

MAX_PARTS = 1024
MAX_HEADERS = 64
MAX_HEADER_CHARS = 16 * 1024
"""Limits of what a call may say about itself; those of the front end are no larger."""
_BODY = "body"
"""Name of the only part of a request that is no form (`HttpRequestHandler.java`)."""

Part = tuple[str, int, int, Literal["json", "bytes", "text"], str]
"""Name of a part, where its bytes begin and end in the payload, its form, and its content type."""


class HandlerParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters by which a protocol describes a payload."""

    parts: list[Part] | None = None
    headers: dict[str, str] = {}
    envelope: bool = False


class RequestHeaders(dict[str, Any]):
    """Headers of a request by name; a name may be written with other capitals."""

    def __missing__(self, name: object) -> Any:
        """Return the header whose name has other capitals."""
        lower = name.lower() if isinstance(name, str) else None
        for key in self:
            if key.lower() == lower:
                return self[key]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a header."""
        return self.get(name, self) is not self

    def get(self, name: Any, default: Any = None) -> Any:
        """Return a header, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


class HandlerRequest:
    """One instance, as a handler gets it. It is valid until its batch is answered."""

    __slots__ = ("_item", "_parsed", "headers", "is_enveloped", "parts")

    def __init__(self, item: Item) -> None:
        """Check an instance.

        Raises:
            InputError: It is none that a handler can read, or its parameters are not right.
        """
        if item.kind in ("tensors", "form"):
            raise InputError(
                f"the handler of an archive takes bytes or JSON, not {_KINDS[item.kind]}"
            )
        self._item = item
        self._parsed: list[object] = []
        given = _parameters_of(item) if item.parameters else _NONE
        self.is_enveloped = given.envelope
        if item.kind == "json":
            if given.parts is not None:
                raise InputError("parameter 'parts' is for bytes, not for JSON")
            self._parsed.append(item.json())  # what is not JSON fails here, on its own
        self.parts = given.parts
        self.headers = given.headers

    def data(self) -> dict[str, object]:
        """Return the parts by name. Each call makes new objects, since handlers may change them."""
        payload = self._item.payload
        if self._item.kind == "json":
            value = self._parsed.pop() if self._parsed else self._item.json()
            return {_BODY: bytearray(value) if isinstance(value, bytes) else value}
        if self.parts is None:
            return {_BODY: bytearray(payload)}
        return {
            name: _value_of(payload[start:end], form) for name, start, end, form, _ in self.parts
        }

    def request_headers(self) -> RequestHeaders:
        """Return the headers of the request, before them an object for each part, as TorchServe."""
        found = RequestHeaders()
        for name, _, _, _, content_type in self.parts or ():
            found[name] = {"content-type": content_type}
        found.update(self.headers)
        return found


_NONE = HandlerParameters()
_KINDS: Mapping[str, str] = {"tensors": "tensors", "form": "a form"}


def _parameters_of(item: Item) -> HandlerParameters:
    try:
        given = msgspec.convert(item.parameters, HandlerParameters)
    except msgspec.ValidationError as error:
        raise InputError(f"parameters of a handler's call: {error}") from None
    if len(given.headers) > MAX_HEADERS:
        raise InputError(f"parameter 'headers' has {len(given.headers)}; at most {MAX_HEADERS}")
    if sum(len(name) + len(text) for name, text in given.headers.items()) > MAX_HEADER_CHARS:
        raise InputError(f"parameter 'headers' has more than {MAX_HEADER_CHARS:,} characters")
    if given.parts is not None:
        if len(given.parts) > MAX_PARTS:
            raise InputError(f"parameter 'parts' has {len(given.parts)}; at most {MAX_PARTS}")
        last = 0
        for name, start, end, *_ in given.parts:
            if not last <= start <= end <= len(item.payload):
                raise InputError(
                    f"parameter 'parts': {name[:80]!r} is from {start} to {end}, and must lie "
                    f"between {last} and {len(item.payload)}"
                )
            last = end
    return given


def _value_of(data: memoryview, form: str) -> object:
    """Return a part as handlers get it; what cannot be decoded stays bytes, as in TorchServe."""
    if form == "bytes":
        return bytearray(data)
    try:
        text = str(data, "utf-8")
        return text if form == "text" else json.loads(text)
    except (ValueError, RecursionError):
        logger.debug("a part is no %s, so the handler gets its bytes", form)
        return bytearray(data)
