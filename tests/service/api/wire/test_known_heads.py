"""A head that comes again is answered as if it had been parsed again. Over real sockets."""

import asyncio
import json
from collections.abc import Callable

import pytest

from inferpool.models.spec import TensorSpec
from inferpool.service.api.call import KnownHeads
from inferpool.service.api.wire.protocol import PredictProtocol
from inferpool.service.errors import OverloadedError
from tests.service.api import test_predict_over_sockets as sockets
from tests.service.api.fakes import FakeModel
from tests.service.api.test_predict_over_sockets import POST, read_answer, run

HEAD = POST + b"content-length: 1\r\n\r\n"


class Bench(sockets.Bench):
    is_direct = True

    @property
    def known(self) -> KnownHeads:
        protocol = self.server.config.http
        assert issubclass(protocol, PredictProtocol)  # type: ignore[arg-type]  # it is a class
        return protocol.known_heads  # type: ignore[union-attr]

    @property
    def num_known(self) -> int:
        return len(self.known)


def bench(**limits: float) -> Callable[[], Bench]:
    return lambda: Bench(FakeModel(), **limits)


def test_the_second_call_with_a_head_is_not_parsed_and_answered_alike() -> None:
    async def test(bench: Bench) -> None:
        answers = []
        async with bench.connect() as (reader, writer):
            for body in (b"x", b"y", b"z"):
                writer.write(HEAD + body)
                answers.append(await read_answer(reader))
                assert bench.num_known == 1
        assert bench.model.bodies == [b"x", b"y", b"z"]
        assert [json.loads(body)["predictions"] for _, _, body in answers] == [[0], [1], [2]]
        names = [list(headers) for _, headers, _ in answers]
        assert names[0] == names[1] == names[2]
        assert len({headers["x-request-id"] for _, headers, _ in answers}) == 3
        assert len({headers["traceparent"] for _, headers, _ in answers}) == 3
        deadlines = [ref.deadline for ref in bench.model.refs]
        assert deadlines == sorted(set(deadlines))

    run(bench(), test)


def test_the_same_head_serves_other_connections() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(2):
            async with bench.connect() as (reader, writer):
                writer.write(HEAD + b"x")
                assert (await read_answer(reader))[0] == 200
        assert bench.num_known == 1

    run(bench(), test)


@pytest.mark.parametrize("size", [0, 1, 3, 20])
def test_a_known_head_whose_body_comes_in_pieces_or_with_the_next_call_is_parsed(size: int) -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(HEAD + b"x")
            await read_answer(reader)
            three = HEAD + b"1" + HEAD + b"2" + HEAD + b"3"
            writer.write(three[: len(HEAD) + size])
            await writer.drain()
            if size:
                await read_answer(reader)
            writer.write(three[len(HEAD) + size :])
            for _ in range(3 - bool(size)):
                assert (await read_answer(reader))[0] == 200
        assert bench.model.bodies == [b"x", b"1", b"2", b"3"]

    run(bench(), test)


def test_the_rest_of_a_refused_body_is_never_taken_for_a_call() -> None:
    smuggled = HEAD + b"!"

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(HEAD + b"x")
            await read_answer(reader)
            bad = POST.replace(b"/predict", b"/predict/nobody")
            writer.write(bad + b"content-length: %d\r\n\r\n" % (2 * len(smuggled)))
            assert (await read_answer(reader))[0] == 404
            writer.write(smuggled)
            with pytest.raises(TimeoutError):  # it is not answered
                await asyncio.wait_for(reader.readexactly(1), 0.3)
            writer.write(smuggled + HEAD + b"y")
            assert (await read_answer(reader))[0] == 200
        assert bench.model.bodies == [b"x", b"y"]

    run(bench(), test)


def test_what_is_pipelined_behind_a_refusal_is_not_remembered_under_its_head() -> None:
    refused = POST.replace(b"/predict", b"/predict/nobody") + b"content-length: 1\r\n\r\n"

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(refused + b"x" + HEAD + b"x")
            assert [(await read_answer(reader))[0] for _ in range(2)] == [404, 200]
            writer.write(refused + b"x")
            assert (await read_answer(reader))[0] == 404

    run(bench(), test)


@pytest.mark.parametrize(
    "line",
    [
        b"x-request-id: one\r\n",
        b"traceparent: 00-%b-%b-01\r\n" % (b"1" * 32, b"2" * 16),
        b"expect: 100-continue\r\n",
        b"connection: close\r\n",
        b"x: %b\r\n" % (b"y" * 3000),
    ],
)
def test_a_head_that_is_of_one_call_is_not_remembered(line: bytes) -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(HEAD.replace(b"content-length", line + b"content-length") + b"x")
            await reader.readuntil(b"\r\n\r\n")
        assert bench.num_known == 0

    run(bench(), test)


def test_empty_lines_before_a_call_are_not_remembered_as_its_head() -> None:
    head = of_type(b"image/png", 500)

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            writer.write(b"\r\n\r\n" + head + b"x" * 500)
            assert (await read_answer(reader))[0] == 200
            for _ in range(2):
                writer.write(b"\r\n\r\n")
                await asyncio.sleep(0.03)
                writer.write(b"\r\n\r\n" + HEAD + b"y")
                assert (await read_answer(reader))[0] == 200
        assert b"\r\n\r\n" not in bench.known
        assert bench.model.bodies == [b"x" * 500, b"y", b"y"]

    run(bench(), test)


def test_a_refusal_at_admission_is_made_anew_each_time() -> None:
    refusals = [None, OverloadedError("full", retry_after_s=3), None]

    async def test(bench: Bench) -> None:
        statuses = []
        async with bench.connect() as (reader, writer):
            for _ in refusals:
                writer.write(HEAD + b"x")
                statuses.append((await read_answer(reader))[0])
        assert statuses == [200, 429, 200]

    run(lambda: Bench(FakeModel(refusals=refusals)), test)


def test_the_number_of_known_heads_is_bounded() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for number in range(600):
                line = b"x-number: %d\r\ncontent-length" % number
                writer.write(HEAD.replace(b"content-length", line) + b"x")
                assert (await read_answer(reader))[0] == 200
        assert 0 < bench.num_known <= 512

    run(bench(), test)


def of_type(content_type: bytes, num_bytes: int) -> bytes:
    return (
        b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        % (
            content_type,
            num_bytes,
        )
    )


async def ask_each(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *calls: bytes
) -> None:
    """Of two with the same head, the second has it known how the body is read."""
    for call in calls:
        writer.write(call)
        assert (await read_answer(reader))[0] == 200


def test_a_known_head_is_read_anew_once_the_model_says_what_it_takes() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for inputs in ((), (), (), [TensorSpec(name="x", dtype="uint8", shape=(-1, 1))]):
                bench.model.inputs = inputs
                writer.write(of_type(b"application/octet-stream", 1) + b"x")
                assert (await read_answer(reader))[0] == 200
        assert [payload.kind for payload in bench.model.payloads] == ["bytes"] * 3 + ["tensors"]
        assert bench.num_known == 1

    run(bench(), test)


def test_a_known_head_keeps_nothing_of_the_body_that_came_with_it_first() -> None:
    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for inputs in ([TensorSpec(name="x", dtype="uint8", shape=(-1, 1))], (), (), ()):
                bench.model.inputs = inputs
                writer.write(of_type(b"application/octet-stream", 1) + b"x")
                assert (await read_answer(reader))[0] == 200
        assert [len(payload.headers) for payload in bench.model.payloads] == [1, 0, 0, 0]
        assert bench.num_known == 1

    run(bench(), test)


def test_each_body_of_json_is_read_under_a_known_head_too() -> None:
    bodies = [b'{"instances": [%d]}' % number for number in range(1, 5)]

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            for body in bodies:
                writer.write(of_type(b"application/json", len(body)) + body)
                assert (await read_answer(reader))[0] == 200
        assert bench.num_known == 1
        assert bench.model.bodies == [b"1", b"2", b"3", b"4"]

    run(bench(), test)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60])
def test_a_body_that_is_the_payload_is_taken_in_pieces_and_what_follows_is_the_next_call(
    cut: int,
) -> None:
    head = of_type(b"image/png", 8)

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            await ask_each(reader, writer, head + b"aaaaaaaa", head + b"bbbbbbbb")
            more = head + b"cccccccc" + head + b"dddddddd" + POST + b"content-length: 1\r\n\r\ne"
            writer.write(more[: len(head) + cut])
            await asyncio.sleep(0.03)
            writer.write(more[len(head) + cut :])
            for _ in range(3):
                assert (await read_answer(reader))[0] == 200
        wanted = [b"aaaaaaaa", b"bbbbbbbb", b"cccccccc", b"dddddddd", b"e"]
        assert bench.model.bodies == wanted

    run(bench(), test)


def test_a_body_in_pieces_that_stops_coming_is_refused_and_its_rest_is_no_call() -> None:
    head = of_type(b"image/png", 200)

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            await ask_each(reader, writer, *[head + b"x" * 200] * 2)
            writer.write(head + b"x" * 100)
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (408, "close")
            writer.write(b"x" * 100 + HEAD + b"x")
            assert await reader.read() == b""
        assert len(bench.model.bodies) == 2

    run(bench(body_gap_s=0.2), test)


def test_a_client_that_leaves_in_the_middle_of_such_a_body_costs_nothing() -> None:
    head = of_type(b"image/png", 200)

    async def test(bench: Bench) -> None:
        async with bench.connect() as (reader, writer):
            await ask_each(reader, writer, *[head + b"x" * 200] * 2)
            writer.write(head + b"x" * 100)
            await asyncio.sleep(0.03)
        await sockets.until(lambda: len(bench.statuses) == 3)
        assert bench.statuses == [200, 200, 499]
        assert len(bench.model.bodies) == 2

    run(bench(), test)
