"""Reads a service's feed `/events`: server-sent events, as the HTML standard (9.2) defines them.

Errors::

    FeedError                   there is no feed; the message says why and what to do
    └── LostError               the service is gone or not ready; a later try may succeed
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from ..cli.flags import METRICS_KEY_VARIABLE
from ..connecting import STRAIGHT, open_async_client
from ..reaching import is_hopeless, problem_in, why_unreached
from ..urls import without_password
from ..usage import COMMAND

_CONNECT_S = 5.0
_SILENCE_S = 10.0
"""Longest time without an event; one comes every second."""
_MAX_EVENT_BYTES = 64 << 20
"""Largest event; five minutes of a hundred models are a tenth of it."""
_TYPE = "text/event-stream"


class FeedError(Exception):
    """There is no feed."""


class LostError(FeedError):
    """The service is gone or not ready."""


class EventFeed:
    """Event feed of one service. You can read it again after it has ended."""

    def __init__(self, url: str, key: str, context: ssl.SSLContext) -> None:
        self.place = without_password(url)
        self._url = url
        self._has_key = bool(key)
        self._client = open_async_client(
            STRAIGHT,
            headers={"Accept": _TYPE, "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            verify=context,
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event `state`, until the service ends the stream.

        Raises:
            FeedError: The service has no feed for us.
            LostError: The service does not answer, or the connection broke.
        """
        try:
            async with self._client.stream("GET", f"{self._url}/events") as answer:
                if answer.status_code != 200:
                    raise await self._refusal(answer)
                if not answer.headers.get("Content-Type", "").startswith(_TYPE):
                    raise self._no_feed()
                async for data in _read_states(answer.aiter_bytes()):
                    yield data
        except httpx.TransportError as error:
            text = why_unreached(error, self._url, command=f"{COMMAND} top")
            raise (FeedError if is_hopeless(error) else LostError)(text) from error

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _refusal(self, answer: httpx.Response) -> FeedError:
        detail = str(problem_in(await answer.aread()).get("detail", ""))
        match answer.status_code:
            case 401 | 403:
                cure = "another key" if self._has_key else "a key for metrics"
                return FeedError(
                    f"{self.place} wants {cure}: --key-file PATH, or the variable "
                    f"{METRICS_KEY_VARIABLE}" + (f" ({detail})" if detail else "")
                )
            case 502 | 503 | 504 | 429:
                said = detail or f"it answers with {answer.status_code}"
                return LostError(f"{self.place} has no feed for us now: {said}")
            case _:
                return self._no_feed()

    def _no_feed(self) -> FeedError:
        return FeedError(
            f"the server at {self.place} is no inferpool, or its version has no /events"
        )


async def _read_states(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    data: list[bytes] = []
    kind = b"message"
    async for chunk in chunks:
        # Not httpx's aiter_lines: JSON may hold characters that Unicode calls line ends.
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise FeedError("an event of the feed has no end")
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b":")
            match field:
                case b"event":
                    kind = value.removeprefix(b" ")
                case b"data":
                    data.append(value.removeprefix(b" "))
                case b"" if not value:
                    if data and kind == b"state":
                        yield b"\n".join(data)
                    data, kind = [], b"message"
