"""The context that TorchServe's handlers get with each batch. Runs in worker processes only.

Handlers import it as `ts.context`; its methods and attributes are those of TorchServe 0.12.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from uuid import uuid4

from inferpool.models.content import Content, type_fault
from inferpool.models.torchserve.answers import HandlerAnswer
from inferpool.models.torchserve.metrics import HandlerMetrics
from inferpool.models.torchserve.requests import HandlerRequest, RequestHeaders

logger = logging.getLogger(__name__)

TORCHSERVE_VERSION = "0.12.0"
"""The release that handlers are told they run in."""
CONTENT_TYPE = "content-type"
STREAM_NEXT = "ts_stream_next"
"""Header by which TorchServe's worker says that another part follows."""
_MAX_REASON_CHARS = 200
_MAX_WARNED = 100

SendParts = Callable[[object, Mapping[int, str]], None]
"""Sends what a handler has for some requests, by their places, before its return."""


class RequestProcessor:
    """The headers of one request, and what a handler has set for its answer."""

    def __init__(self, request_header: Mapping[str, object]) -> None:
        """Store the headers of a request."""
        self._request_header = (
            request_header
            if isinstance(request_header, RequestHeaders)
            else RequestHeaders(request_header)
        )
        self._status_code = 200
        self._reason_phrase: str | None = None
        self._response_header: dict[str, str] = {}

    def get_request_property(self, key: str) -> object:
        """Return a header of the request, or None."""
        return self._request_header.get(key)

    def get_request_properties(self) -> RequestHeaders:
        """Return all headers of the request."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the status of the answer.

        Raises:
            ValueError: There is no such status.
        """
        if not 200 <= int(code) <= 599:
            raise ValueError(f"the status of an answer must be from 200 to 599, not {code!r}")
        self._status_code = int(code)
        phrase = str(reason_phrase or "")[:_MAX_REASON_CHARS]
        self._reason_phrase = phrase if phrase.isascii() and phrase.isprintable() else None

    def get_response_status_code(self) -> int:
        """Return the status of the answer."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the phrase of the status, if one was set."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a header of the answer; one that cannot be sent is left out, and the log says so."""
        key, value = str(key), str(value)
        if key.lower() == CONTENT_TYPE:
            key, fault = CONTENT_TYPE, type_fault(value)
        else:
            headers = {**self._response_header, key: value}
            headers.pop(CONTENT_TYPE, None)
            fault = Content(b"", "text/plain", headers).fault
        if fault:
            _warn_once(key, fault)
        else:
            self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        """Return a header of the answer, or None."""
        return self._response_header.get(key)


class HandlerContext:
    """The context of one handler. It is used for one batch after the other."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Mapping[str, object] | None,
        batch_size: int,
        gpu: int | None,
        *,
        max_image_pixels: int | None = None,
        metrics: HandlerMetrics | None = None,
        model_yaml_config: Mapping[str, object] | None = None,
    ) -> None:
        """Store facts about a model, and the devices that it may use."""
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties: dict[str, object] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",  # as TorchServe says
            "server_version": TORCHSERVE_VERSION,
            "limit_max_image_pixels": True,
        }
        if max_image_pixels is not None:
            self.system_properties["max_image_pixels"] = max_image_pixels
        self.metrics = metrics if metrics is not None else HandlerMetrics(model_name)
        self.model_yaml_config = {} if model_yaml_config is None else dict(model_yaml_config)
        self.request_ids: dict[int, str] | None = None
        self.request_processor: Sequence[RequestProcessor] = ()
        self.stopping_criteria: object = None
        self.explain = False
        self.send_parts: SendParts | None = None
        """Sends parts before the handler returns; None if this archive does not stream."""
        self.header_key_sequence_id = os.getenv("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")

    def begin(self, requests: Sequence[HandlerRequest]) -> None:
        """Begin with another batch."""
        headers = [request.request_headers() for request in requests]
        self.request_ids = {
            place: str(each.get("x-request-id") or uuid4()) for place, each in enumerate(headers)
        }
        self.request_processor = [RequestProcessor(each) for each in headers]
        self.metrics.request_ids = self.request_ids

    def answer(self, place: int, value: object, *, more: bool | None = None) -> HandlerAnswer:
        """Return an answer with what the handler has set for a request."""
        processor = self.request_processor[place]
        headers = {**processor.get_response_headers()}
        return HandlerAnswer(
            value=value,
            status=processor.get_response_status_code(),
            reason=processor.get_response_status_phrase(),
            content_type=headers.pop(CONTENT_TYPE, None),
            headers=headers,
            more=more,
        )

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request."""
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> object:
        """Return a header of a request, or None."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> RequestHeaders:
        """Return all headers of a request."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the media type of an answer."""
        self.set_response_header(idx, CONTENT_TYPE, value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the media type that was set for an answer."""
        return self.get_response_headers(idx).get(CONTENT_TYPE)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Return the status of an answer, and its phrase."""
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of an answer."""
        if self.request_processor:
            self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status of all answers of the batch."""
        for each in self.request_processor:
            each.report_status(code, reason_phrase=phrase)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers that were set for an answer."""
        return self.request_processor[idx].get_response_headers()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of an answer."""
        self.request_processor[idx].add_response_property(key, value)

    def get_sequence_id(self, idx: int) -> object:
        """Return the id of the sequence that a request is part of, if it has one."""
        return self.get_request_header(idx, self.header_key_sequence_id)


def send_intermediate_predict_response(
    ret: object,
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: HandlerContext | None = None,
) -> None:
    """Send parts of answers before the handler returns, as `ts.handler_utils.utils` does.

    Args:
        ret: A value for each place in `req_id_map`.
        req_id_map: `context.request_ids`, or some of them.
        message: Unused, as in TorchServe if the code is 200.
        code: 200.
        context: The handler's context.

    Raises:
        RuntimeError: This archive is served as one that does not stream.
    """
    if context is None or context.send_parts is None:
        raise RuntimeError(
            "this archive is served as one that answers at once, since no Python file in it names "
            "send_intermediate_predict_response: set options = { streaming = true }"
        )
    context.send_parts(ret, req_id_map)


@lru_cache(_MAX_WARNED)
def _warn_once(name: str, fault: str) -> None:
    logger.warning("the header %r that a handler has set is left out: %s", name[:80], fault)
