"""Ids and times on the answers of all routes, as `/predict` puts them on its own."""

from collections.abc import MutableMapping
from typing import Any

from starlette.types import Send

from inferpool.service.api.call import Call
from inferpool.service.api.replies import common_lines, lines_of, pairs_of

_ADDS_UP = b"vary"
"""May be there several times (RFC 9110, 12.5.5)."""


def with_call_headers(call: Call, send: Send) -> Send:
    """An ASGI `send` that adds them to the answer to a call, where it has not its own."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            headers = list(message.get("headers", ()))
            there = {name for name, _ in headers}
            ours = pairs_of(common_lines(call, None).encode())
            headers += [pair for pair in ours if pair[0] not in there or pair[0] == _ADDS_UP]
            lines_of(headers)  # raises before anything of the answer is sent
            message = {**message, "headers": headers}
        await send(message)

    return sending
