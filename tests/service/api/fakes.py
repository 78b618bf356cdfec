"""A model that answers at once, or when told, and a client that speaks to it over ASGI."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from mmap import mmap
from multiprocessing import Pipe
from typing import Any

import httpx

from inferpool.models.spec import USUAL_INTERFACE, Interface, TensorSpec
from inferpool.service.api.asgi import answer
from inferpool.service.api.codecs.body import BodyContext, Decoded, Limits, Payload
from inferpool.service.api.exchange import Call, Exchange, ModelEntry, Predict
from inferpool.service.api.exchange import Reply as Answered
from inferpool.service.errors import ServiceError
from inferpool.service.parts.fronts.front_side import FrontSide, RemoteModel
from inferpool.service.parts.fronts.main_side import ArenaPart, MainSide, rows_of
from inferpool.service.parts.fronts.messages import FrontCounts
from inferpool.service.queue.instance import (
    Buffer,
    InstanceSteps,
    InstanceTiming,
    Result,
    SlotOwner,
    StreamReader,
)
from inferpool.workers.shared.arena import Arena, Slots
from inferpool.workers.shared.messages import ItemRef

Reply = Result | Exception | None
MOUNTED = "/mounted"
"""Before the path of a call that reaches the endpoint by ASGI whatever the server is."""
TIMING = InstanceTiming(0.001, 0.002, 0.003)


def result(value: object = b'"ok"') -> Result:
    return Result(value, TIMING)  # type: ignore[arg-type]  # tests know what they put in


class FakeInstance(asyncio.Future[Result]):
    """Like the dispatcher's, it leaves a future that is done as it is when it is cancelled."""

    def cancel(self, msg: object = None) -> bool:
        return not self.done() and super().cancel(msg)

    def end(self, error: ServiceError) -> None:
        if not self.done():
            self.set_exception(error)


class FakeModel:
    """Notes what it is asked and replies as told: a result, an error, or (None) nothing yet."""

    def __init__(
        self,
        reply: Callable[[int], Reply] = lambda index: result(b"%d" % index),
        *,
        name: str = "fake",
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
        refusals: Sequence[ServiceError | None] = (),
        interface: Interface = USUAL_INTERFACE,
    ) -> None:
        self.name = name
        self.version = 1
        self.is_serving = True
        self.canary = None
        self.inputs = inputs
        self.outputs: Sequence[TensorSpec] = outputs
        self.interface = interface
        self.payloads: list[Payload] = []
        self.refs: list[ItemRef] = []
        self.futures: list[FakeInstance] = []
        self.readers: list[StreamReader | None] = []
        self._reply = reply
        self._refusals = list(refusals)

    @property
    def bodies(self) -> list[bytes]:
        return [body_of(payload) for payload in self.payloads]

    def submit(
        self,
        ref: ItemRef,
        chunks: Sequence[Buffer],
        steps: InstanceSteps | None = None,
        owner: SlotOwner | None = None,
        reader: StreamReader | None = None,
    ) -> "asyncio.Future[Result]":
        assert ref.request_id
        assert ref.num_bytes == sum(map(len, chunks))
        refusal = self._refusals.pop(0) if self._refusals else None
        if refusal is not None:
            raise refusal
        index = len(self.payloads)
        self.payloads.append(Payload(ref.kind, chunks, ref.headers))
        self.refs.append(ref)
        self.readers.append(reader)
        future = FakeInstance()
        self.futures.append(future)
        asyncio.get_running_loop().call_soon(self._settle, future, self._reply(index))
        return future

    def _settle(self, future: "asyncio.Future[Result]", reply: Reply) -> None:
        if future.done() or reply is None:
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)


class NoWire:
    """Nobody reads the answers, but for a function that is told each."""

    def __init__(self, on_answer: Callable[[Answered], object] = lambda reply: None) -> None:
        self._on_answer = on_answer

    def owner_of(self, call: Call) -> str:
        return ""

    def open_stream(
        self, exchange: Exchange, lines: bytes, on_writable: Callable[[], None]
    ) -> object:
        return None

    def send_continue(self) -> None:
        pass

    def send_answer(self, exchange: Exchange, reply: Answered) -> None:
        self._on_answer(reply)
        exchange.close(reply[0])


class Models:
    """A catalog of one version of each model."""

    def __init__(self, *models: ModelEntry) -> None:
        self.loaded = dict(enumerate(models))
        self.entries = {model.name: model for model in models}


def both_sides(
    part: ArenaPart,
    memory: mmap,
    model: ModelEntry,
    on_counts: Callable[[FrontCounts], object] = print,
    key_share: float = 1.0,
) -> tuple[MainSide, FrontSide, Slots]:
    """Both sides of a new front, joined by two pipes; it knows which slots are in use."""
    from_front, to_main = Pipe(duplex=False)
    from_main, to_front = Pipe(duplex=False)
    main_side = MainSide(
        "front/0", from_front, to_front,
        part=part, models=Models(model), on_counts=on_counts, on_end=print,
    )  # fmt: skip
    slots = Slots(memory, part.where.start, len(part.where))
    for offset, num_bytes in part.held.items():
        slots.reserve(offset, num_bytes)
    front_side = FrontSide(from_main, to_main, slots, print, print, key_share)
    front_side.take_models(rows_of(Models(model)))
    return main_side, front_side, slots


def in_front(model: FakeModel, arena: Arena) -> RemoteModel:
    """A model as a front knows it."""
    (where,) = arena.give_away(1)
    memory = arena.memory.map
    _, front_side, _ = both_sides(ArenaPart(memory, where), memory, model)
    return front_side.models[model.name]


def body_of(payload: Payload) -> bytes:
    return b"".join(bytes(chunk) for chunk in payload.chunks)


def head(
    query: bytes = b"",
    *,
    headers: dict[bytes, bytes] | None = None,
    inputs: Sequence[TensorSpec] = (),
    interface: Interface = USUAL_INTERFACE,
    **limits: int,
) -> BodyContext:
    return BodyContext(headers or {}, query, inputs, Limits(**limits), interface)


def spec(*shape: int, name: str = "x", dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def kinds(decoded: Decoded) -> list[tuple[str, bytes]]:
    return [(payload.kind, body_of(payload)) for payload in decoded.payloads]


def kinds_of(model: FakeModel) -> list[tuple[str, bytes]]:
    """Return the kind and the bytes of each instance that a model got."""
    return [(each.kind, body) for each, body in zip(model.payloads, model.bodies, strict=True)]


def endpoint(model: ModelEntry, **options: object) -> Predict:
    return Predict({model.name: model}, default=model.name, **options)  # type: ignore[arg-type]


def as_app(predict: Predict) -> Callable[..., Awaitable[None]]:
    """An endpoint under any ASGI server, where `MOUNTED` leads to it too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(predict, scope["path"].removeprefix(MOUNTED), scope, receive, send)

    return app


def post(app: object, path: str = "/predict", **request: object) -> httpx.Response:
    """One call to an ASGI application, in a loop of its own."""
    return call(app, "POST", path, **request)


def call(app: object, method: str, path: str, **request: object) -> httpx.Response:
    if isinstance(app, Predict):
        app = as_app(app)

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, **request)  # type: ignore[arg-type]

    return asyncio.run(go())
