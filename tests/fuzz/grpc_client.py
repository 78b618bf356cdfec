"""Sends hostile calls of gRPC, and judges what comes of them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from tests.fuzz.client import ANSWER_TIMEOUT_S
from tests.fuzz.infer import HostileCall
from tests.grpc_messages import fields_of

_FINE = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_CALLS_PER_CHANNEL = 500


@dataclass(slots=True)
class GrpcExchange:
    """A call and its answers."""

    call: HostileCall
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    answers: Sequence[bytes] = field(default_factory=list)

    @property
    def offence(self) -> str:
        """Why this must not be; empty if it may."""
        may_be_late = any(b"timeout" in each for each in self.call.messages)
        is_late = self.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if self.code not in _FINE and not (is_late and may_be_late):
            return f"{self.code.name}: {self.details[:300]}"
        if self.code is not grpc.StatusCode.OK:
            return "" if self.details else f"{self.code.name} without a word"
        try:
            for each in self.answers:
                list(fields_of(each))
        except ValueError as error:
            return f"an answer is no message: {error}"
        num = len(self.call.messages)
        if self.call.is_stream and len(self.answers) != num:
            return f"{len(self.answers)} answers to the {num} messages of a stream"
        return ""


async def send_calls(
    target: str,
    calls: Iterator[HostileCall],
    on_exchange: Callable[[GrpcExchange], None],
    num_clients: int,
) -> None:
    """Send calls by many clients, each with a channel of its own, until there are no more."""

    async def work() -> None:
        # Without the option, channels to one address would share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        is_over = False
        while not is_over:
            async with aio.insecure_channel(target, options=options) as channel:
                for _ in range(_CALLS_PER_CHANNEL):
                    call = next(calls, None)
                    if call is None:
                        is_over = True
                        break
                    on_exchange(await _send(channel, call))

    await asyncio.gather(*(work() for _ in range(num_clients)))


async def _send(channel: aio.Channel, call: HostileCall) -> GrpcExchange:
    exchange = GrpcExchange(call)
    options = {
        "timeout": ANSWER_TIMEOUT_S,
        "compression": grpc.Compression.Gzip if call.is_squeezed else None,
    }
    try:
        if call.is_stream:
            stream = channel.stream_stream(call.method)(iter(call.messages), **options)
            exchange.answers = [each async for each in stream]
        else:
            exchange.answers = [await channel.unary_unary(call.method)(call.messages[0], **options)]
    except aio.AioRpcError as error:
        exchange.code, exchange.details = error.code(), error.details() or ""
    return exchange
