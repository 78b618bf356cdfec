"""A head that comes again is answered as if it had been parsed again. Over real sockets."""

import asyncio

import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE, USUAL_INTERFACE, TensorSpec
from inferpool.service.errors import OverloadedError
from inferpool.workers.shared.messages import TensorBlob
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import LONG_S, NOBODY, ONE, POST, RawClient, serve, until

HEAD = ONE[:-1]


def head_of(content_type: bytes, num_bytes: int) -> bytes:
    head = POST.replace(b"image/png", content_type)
    return head + b"content-length: %d\r\n\r\n" % num_bytes


async def ask_twice(client: RawClient, call: bytes) -> None:
    """Make a head known, and with the second call also how its body is read."""
    for _ in range(2):
        assert await client.status(call) == 200


async def test_calls_with_a_known_head_are_answered_alike_on_any_connection() -> None:
    async with serve() as server:
        async with server.connect() as client:
            answers = [await client.ask(HEAD + body) for body in (b"x", b"y")]
        answers.append(await server.answer_to(HEAD + b"z"))
        assert len(server.protocol.known_heads) == 1
    assert server.model.bodies == [b"x", b"y", b"z"]
    assert [each.json["predictions"] for each in answers] == [[0], [1], [2]]
    names = [list(each.headers) for each in answers]
    assert names[0] == names[1] == names[2]
    for name in ("x-request-id", "traceparent"):
        assert len({each.headers[name] for each in answers}) == 3
    deadlines = [ref.deadline for ref in server.model.refs]
    assert deadlines == sorted(set(deadlines))


async def test_a_head_is_unknown_while_nobody_knows_the_answers_of_its_model() -> None:
    async with serve() as server, server.connect() as client:
        server.model.interface = UNKNOWN_INTERFACE
        assert await client.status(ONE) == 200
        assert not server.protocol.known_heads
        server.model.interface = USUAL_INTERFACE
        assert await client.status(ONE) == 200
        assert len(server.protocol.known_heads) == 1


@pytest.mark.parametrize("size", [0, 1, 3, 20])
async def test_a_known_head_with_an_incomplete_body_is_answered_alike(size: int) -> None:
    async with serve() as server, server.connect() as client:
        assert await client.status(ONE) == 200
        three = HEAD + b"1" + HEAD + b"2" + HEAD + b"3"
        client.send(three[: len(HEAD) + size])
        await client.writer.drain()
        if size:
            await client.read_answer()
        client.send(three[len(HEAD) + size :])
        num = 3 - bool(size)
        assert await client.read_statuses(num) == [200] * num
    assert server.model.bodies == [b"x", b"1", b"2", b"3"]


async def test_the_rest_of_a_refused_body_is_never_taken_for_a_call() -> None:
    smuggled = HEAD + b"!"
    async with serve() as server, server.connect() as client:
        await client.ask(ONE)
        length = b"content-length: %d\r\n\r\n" % (2 * len(smuggled))
        assert await client.status(NOBODY + length) == 404
        client.send(smuggled)
        with pytest.raises(TimeoutError):  # it is not answered
            await asyncio.wait_for(client.reader.readexactly(1), 0.3)
        assert await client.status(smuggled + HEAD + b"y") == 200
    assert server.model.bodies == [b"x", b"y"]


async def test_a_refusal_is_made_anew_and_not_for_the_call_behind_it() -> None:
    refused = NOBODY + b"content-length: 1\r\n\r\nx"
    refusals = [None, OverloadedError("full", retry_after_s=3), None]  # at admission
    async with serve(FakeModel(refusals=refusals)) as server, server.connect() as client:
        client.send(refused + ONE)
        assert await client.read_statuses(2) == [404, 200]
        assert await client.status(refused) == 404
        assert [await client.status(ONE) for _ in range(2)] == [429, 200]


@pytest.mark.parametrize(
    "line",
    [
        b"x-request-id: one\r\n",
        b"traceparent: 00-%b-%b-01\r\n" % (b"1" * 32, b"2" * 16),
        b"expect: 100-continue\r\n",
        b"x: %b\r\n" % (b"y" * 3000),
    ],
)
async def test_a_head_that_is_of_one_call_is_not_remembered(line: bytes) -> None:
    async with serve() as server, server.connect() as client:
        client.send(POST + line + b"content-length: 1\r\n\r\nx")
        await client.read_head()
        assert not server.protocol.known_heads


async def test_a_known_head_that_closes_its_connection_closes_each() -> None:
    call = POST + b"connection: close\r\ncontent-length: 1\r\n\r\nx"
    async with serve() as server:
        for _ in range(2):
            async with server.connect() as client:
                client.send(call + call)  # the second one comes too late
                (answer,) = await client.read_all()
                assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert len(server.protocol.known_heads) == 1
        assert server.statuses == [200, 200]
        assert await server.is_well()


async def test_empty_lines_before_a_call_are_not_remembered_as_its_head() -> None:
    head = head_of(b"image/png", 500)
    async with serve() as server, server.connect() as client:
        assert await client.status(b"\r\n\r\n" + head + b"x" * 500) == 200
        for _ in range(2):
            client.send(b"\r\n\r\n")
            await asyncio.sleep(0.03)
            assert await client.status(b"\r\n\r\n" + HEAD + b"y") == 200
        assert b"\r\n\r\n" not in server.protocol.known_heads
    assert server.model.bodies == [b"x" * 500, b"y", b"y"]


async def test_the_number_of_known_heads_is_bounded() -> None:
    async with serve() as server, server.connect() as client:
        for number in range(600):
            line = b"x-number: %d\r\n" % number
            assert await client.status(POST + line + b"content-length: 1\r\n\r\nx") == 200
        assert 0 < len(server.protocol.known_heads) <= 512


ROWS = [TensorSpec(name="x", dtype="uint8", shape=(-1, 4))]
TENSOR = [TensorSpec(name="x", dtype="uint8", shape=(-1, 1))]


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param([(), (), (), TENSOR], id="the model says later what it takes"),
        pytest.param([TENSOR, (), (), ()], id="nothing is kept of the first body"),
    ],
)
async def test_a_body_under_a_known_head_is_read_by_the_inputs_of_now(inputs: list[object]) -> None:
    async with serve() as server, server.connect() as client:
        for each in inputs:
            server.model.inputs = each  # type: ignore[assignment]  # specs
            assert await client.status(head_of(b"application/octet-stream", 1) + b"x") == 200
        assert len(server.protocol.known_heads) == 1
    for payload, each in zip(server.model.payloads, inputs, strict=True):
        assert payload.kind == ("tensors" if each else "bytes")
        assert len(payload.headers) == bool(each)


@pytest.mark.parametrize(
    ("query", "inputs", "is_known"),
    [
        pytest.param(b"?dtype=uint8&shape=4&top_k=2", (), True, id="one instance"),
        pytest.param(b"?dtype=uint8&shape=1,4", ROWS, True, id="a batch of one"),
        pytest.param(b"", ROWS, True, id="of the model's shape"),
        pytest.param(b"?dtype=uint8&shape=2,2", ROWS, False, id="two instances"),
        pytest.param(b"?dtype=bool&shape=4", (), False, id="bools"),
    ],
)
async def test_raw_tensors_under_a_known_head_are_read_as_at_first(
    query: bytes, inputs: list[TensorSpec], is_known: bool
) -> None:
    head = head_of(b"application/octet-stream", 4).replace(b"/predict", b"/predict" + query)
    head = head.replace(b"\r\nhost", b"\r\naccept: application/safetensors\r\nhost")
    bodies = [b"\0\1\0\1", b"\1\0\1\0", b"\1\1\1\1"]
    model = FakeModel(lambda _: result([TensorBlob("y", "uint8", (4,), b"abcd")]), inputs=inputs)
    async with serve(model) as server, server.connect() as client:
        answers = [await client.ask(head + body) for body in bodies]
        (known,) = server.protocol.known_heads.values()
        assert (known.call.form is not None) == is_known
    assert [answer.status for answer in answers] == [200] * 3
    assert len({answer.body for answer in answers}) == 1
    assert b"".join(model.bodies) == b"".join(bodies)
    for payload, ref in zip(model.payloads, model.refs, strict=True):
        assert payload.headers == model.payloads[0].headers
        assert ref.parameters == model.refs[0].parameters


async def test_each_body_of_json_is_read_under_a_known_head_too() -> None:
    async with serve() as server, server.connect() as client:
        for number in range(1, 5):
            body = b'{"instances": [%d]}' % number
            assert await client.status(head_of(b"application/json", len(body)) + body) == 200
        assert len(server.protocol.known_heads) == 1
    assert server.model.bodies == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60])
async def test_a_body_under_a_known_head_may_come_in_pieces(cut: int) -> None:
    head = head_of(b"image/png", 8)
    async with serve() as server, server.connect() as client:
        await ask_twice(client, head + b"aaaaaaaa")
        more = head + b"cccccccc" + head + b"dddddddd" + HEAD + b"e"
        client.send(more[: len(head) + cut])
        await asyncio.sleep(0.03)
        client.send(more[len(head) + cut :])
        assert await client.read_statuses(3) == [200] * 3
    assert server.model.bodies == [b"aaaaaaaa"] * 2 + [b"cccccccc", b"dddddddd", b"e"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_rest_of_a_body_that_was_given_up_is_no_call(leaves: bool) -> None:
    head = head_of(b"image/png", 200)
    async with serve(body_gap_s=LONG_S if leaves else 0.2) as server:
        async with server.connect() as client:
            await ask_twice(client, head + b"x" * 200)
            client.send(head + b"x" * 100)
            if leaves:
                await until(lambda: server.use.unfinished_bytes)
            else:
                answer = await client.read_answer()
                assert (answer.status, answer.headers["connection"]) == (408, "close")
                client.send(b"x" * 100 + ONE)
                assert await client.is_closed()
        await until(lambda: len(server.statuses) == 3)
        assert server.statuses == [200, 200, 499 if leaves else 408]
        assert len(server.model.bodies) == 2
