"""Listens to a service's feed `/events`: server-sent events, as the HTML standard (9.2) has them.

Errors::

    FeedError                   nothing can be shown; the message says why and what to do
    └── LostError               the service is there no more, or not yet: another try may do
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import msgspec

from inferpool.service.tools.top.plan import KEY_VARIABLE, TopPlan

_CONNECT_S = 5.0
_SILENCE_S = 10.0
"""An event comes every second."""
_MAX_EVENT_BYTES = 64 << 20
"""Five minutes of a hundred models are a tenth of it."""
_TYPE = "text/event-stream"


class FeedError(Exception):
    """Nothing can be shown."""


class LostError(FeedError):
    """The service is there no more, or not yet."""


class EventFeed:
    """The events of one service, which may be listened to again and again."""

    def __init__(self, plan: TopPlan) -> None:
        """Prepare to connect.

        Raises:
            FeedError: The certificates to trust cannot be read.
        """
        self._url = plan.url
        self._place = plan.place
        self._has_key = bool(plan.key)
        self._client = httpx.AsyncClient(
            headers={"Accept": _TYPE, "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {plan.key}"} if plan.key else {}),
            verify=_context(plan),
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            trust_env=False,  # a proxy is for the world outside
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event `state`, until the service ends the stream.

        Raises:
            FeedError: There is no feed for us.
            LostError: Nobody answers, or not any more.
        """
        try:
            async with self._client.stream("GET", f"{self._url}/events") as answer:
                if answer.status_code != 200:
                    raise await self._refusal(answer)
                if not answer.headers.get("Content-Type", "").startswith(_TYPE):
                    raise self._no_feed()
                async for data in _data_of(answer.aiter_bytes()):
                    yield data
        except httpx.TimeoutException as error:
            raise LostError(f"{self._place} says nothing") from error
        except httpx.TransportError as error:
            raise self._no_connection(error) from error

    async def close(self) -> None:
        """Hang up."""
        await self._client.aclose()

    async def _refusal(self, answer: httpx.Response) -> FeedError:
        detail = _detail_of(await answer.aread())
        match answer.status_code:
            case 401 | 403:
                cure = "another key" if self._has_key else "a key for metrics"
                return FeedError(
                    f"{self._place} wants {cure}: --key-file PATH, or the variable {KEY_VARIABLE}"
                    + (f" ({detail})" if detail else "")
                )
            case 502 | 503 | 504 | 429:
                said = detail or f"it answers with {answer.status_code}"
                return LostError(f"{self._place} has no feed for us now: {said}")
            case _:
                return self._no_feed()

    def _no_feed(self) -> FeedError:
        return FeedError(
            f"what answers at {self._place} is no inferpool, or one of a version without /events"
        )

    def _no_connection(self, error: httpx.TransportError) -> FeedError:
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return FeedError(
                f"the certificate of {self._place} is not trusted ({text}): --ca-file PATH names "
                "one to trust, --insecure trusts any"
            )
        if "WRONG_VERSION_NUMBER" in text:
            return FeedError(f"{self._place} speaks no TLS; is it http?")
        if isinstance(error, httpx.RemoteProtocolError | httpx.UnsupportedProtocol):
            cause = "; is it https?" if self._url.startswith("http:") else ""
            return LostError(f"{self._place} broke off ({text}){cause}")
        if isinstance(error, httpx.ConnectError):
            return LostError(
                f"nobody answers at {self._place} ({text}). Start a service with `inferpool "
                "serve`, or name another: `inferpool top --url http://HOST:PORT`"
            )
        return LostError(f"the connection to {self._place} was lost ({text})")


def _context(plan: TopPlan) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=plan.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise FeedError(f"--ca-file: {plan.ca_file}: {error}") from error
    if plan.is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def _data_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event."""
    rest = b""
    data: list[bytes] = []
    kind = b"message"
    async for chunk in chunks:
        # Only so: JSON may hold what Unicode calls line ends.
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


def _detail_of(body: bytes) -> str:
    """What a problem document says."""
    try:
        problem = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    detail = problem.get("detail") if isinstance(problem, dict) else None
    return detail if isinstance(detail, str) else ""
