"""Reads the bodies of calls that change models, or ask about them. Runs in the event loop."""

import asyncio
from collections.abc import Mapping

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from inferpool.service.errors import BadRequestError, TooLargeError

_BODY_S = 10.0
"""How long a body may take to arrive."""


async def body_of(request: Request, *, most_bytes: int) -> bytes:
    """Read a body.

    Raises:
        BadRequestError: It does not arrive.
        TooLargeError: It is too long.
    """
    body = b""
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise TooLargeError(f"the body is larger than {most_bytes} bytes")
    except TimeoutError:
        raise BadRequestError(f"the body did not arrive within {_BODY_S:g} s") from None
    except ClientDisconnect:  # nobody sees the answer
        raise BadRequestError("the client was gone before its body was complete") from None
    return body


def object_in(body: bytes) -> Mapping[str, object]:
    """Return the JSON object that a body holds.

    Raises:
        BadRequestError: It holds something else.
    """
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadRequestError("the body must be a JSON object")
    return decoded
