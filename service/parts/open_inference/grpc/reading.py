"""Bounds the time and the memory of messages on their way, both ways. Event loop."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from grpc import aio

from inferpool.service.api.exchange import Predict
from inferpool.service.errors import BadRequestError, OverloadedError, ServiceError, SlowBodyError

_SMALL_BYTES = 64 * 1024
"""Answers up to this size are bounded by the number of calls."""
SOON_S = 0.2
"""A message that takes longer counts as an unfinished request."""


class MessageReader:
    """Reads the only message of a call.

    grpcio does not say how much of a message has come. So one that takes long counts with the most
    that it may have.
    """

    def __init__(self, predict: Predict, soon_s: float = SOON_S) -> None:
        """Keep to the limits of an endpoint; a message that takes longer than `soon_s` counts."""
        self._predict = predict
        self._soon_s = soon_s

    async def read(self, context: Any, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the message of a call, given grpcio's context and the call's metadata.

        Raises:
            BadRequestError: There is none.
            SlowBodyError: It did not come in time.
            OverloadedError: There is no room for one that takes this long.
        """
        limits = self._predict.limits
        arrival = _Arrival(self._predict, headers, client_of(context.peer()), self._soon_s)
        try:
            async with asyncio.timeout(limits.max_timeout_s):
                message = await context.read()
        except asyncio.CancelledError:
            if arrival.error is None:
                raise
            arrival.task.uncancel()
            raise arrival.error from None
        except TimeoutError:
            raise SlowBodyError(f"no message came for {limits.max_timeout_s:g} s") from None
        finally:
            arrival.close()
        if message is aio.EOF:
            raise BadRequestError("the call has no message")
        assert isinstance(message, bytes)
        return message


class _Arrival:
    """A message on its way."""

    def __init__(
        self, predict: Predict, headers: Mapping[bytes, bytes], client: str | None, soon_s: float
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.error: ServiceError | None = None
        """Why it is not waited for any more."""
        self._predict = predict
        self._headers = headers
        self._client = client
        self._timer = asyncio.get_running_loop().call_later(soon_s, self._count)

    def owner(self) -> str:
        """Return the owner of the memory that it takes."""
        return self._predict.owner_of(self._headers, self._client)

    def give_way(self, error: ServiceError) -> None:
        """End its call, for the sake of others."""
        self.error = error
        self.task.cancel()

    def close(self) -> None:
        """Stop counting: it is here, or its call is over."""
        self._timer.cancel()
        self._predict.unfinished.give_back(self)

    def _count(self) -> None:
        try:
            self._predict.unfinished.hold(self, self._predict.limits.max_body_bytes)
        except OverloadedError as error:
            self.give_way(error)


class UnsentAnswers:
    """Bounds the bytes of answers that grpcio keeps for clients that do not read them.

    Nothing can take an answer back from grpcio but the end of its connection. So where there is no
    room, the next answer is refused.
    """

    def __init__(self, predict: Predict) -> None:
        """Keep to the limits of an endpoint."""
        self._predict = predict
        self._owners: Counter[str] = Counter()
        self._num_bytes = 0

    def hold(self, context: Any, headers: Mapping[bytes, bytes], num_bytes: int) -> None:
        """Count an answer until its client has read it.

        Args:
            context: The call, as grpcio has it.
            headers: The metadata of the call.
            num_bytes: The length of the answer.

        Raises:
            OverloadedError: There is no room.
        """
        if num_bytes <= _SMALL_BYTES:
            return
        owner = self._predict.owner_of(headers, client_of(context.peer()))
        unread, own = self._predict.unread, self._owners[owner]
        most = unread.share * (unread.max_bytes - (self._num_bytes - own))
        if own and own + num_bytes > most:
            raise OverloadedError(
                f"clients have not read {self._num_bytes} bytes of answers (max_unread_bytes, of "
                "which a key or an address has its share)",
                retry_after_s=1,
            )
        self._add(owner, num_bytes)
        context.add_done_callback(lambda _: self._add(owner, -num_bytes))

    def _add(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._owners[owner] += num_bytes
        if not self._owners[owner]:
            del self._owners[owner]


def client_of(peer: str) -> str | None:
    """Return the address of a client, as grpcio names it; None if it has none."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return unquote(address).rpartition(":")[0].strip("[]")
