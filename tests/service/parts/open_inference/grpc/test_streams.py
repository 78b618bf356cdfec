import asyncio
import weakref
from typing import Any

import pytest
from grpc import StatusCode, aio

from inferpool.models.spec import Interface
from inferpool.service.errors import InvalidInputError, OverloadedError
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.parts.open_inference.grpc.streams import MAX_UNDER_WAY, InferStream
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import silent_model, until
from tests.service.parts.open_inference.grpc.serving import Channel, ask_and_read_nothing, serving

REQUEST = schema().message(INFERENCE, "ModelInferRequest")
STREAMING = Interface(streams=True)


def request(number: int = 0, **fields: Any) -> Any:
    contents = {"bytes_contents": [b"a text"]}
    tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "contents": contents}
    given = {"model_name": "fake", "id": str(number), "inputs": [tensor], **fields}
    return REQUEST(**given)


def text_in(answer: Any) -> str:
    """Return the error in an answer, or the id of its request and its only element."""
    response = answer.infer_response
    if answer.error_message:
        return f"{response.id}: {answer.error_message}"
    final = response.parameters["triton_final_response"].bool_param
    content = b"".join(response.raw_output_contents)[4:].decode()
    return f"{response.id}: {content}{' final' if final else ''}"


def stream_of(channel: Channel) -> Any:
    return channel.call("ModelStreamInfer")()


async def test_an_error_costs_its_request_alone_and_answers_are_in_order():
    replies = [None, InvalidInputError("bad"), result(b'"third"')]
    async with serving(model := FakeModel(replies.__getitem__)) as (served, channel):
        stream = stream_of(channel)
        for number in range(3):
            await stream.write(request(number))
        await stream.write(request(3, model_name="other"))
        await stream.write(REQUEST(model_name="fake", id="4"))
        await until(lambda: len(served.done) == 4)
        model.futures[0].set_result(result(b'"first"'))
        await stream.done_writing()
        answers = [text_in(answer) async for answer in stream]
        assert answers[:3] == ["0: first final", "1: bad", "2: third final"]
        assert answers[3].startswith("3: no model is called 'other'")
        assert answers[4].startswith("4: inputs: has 0")
        assert await stream.code() is StatusCode.OK
        assert sorted(status for _, status in served.done) == [200, 200, 400, 404, 422]


@pytest.mark.parametrize("wants_final", [False, True])
async def test_models_that_answer_in_parts_give_each(wants_final: bool):
    model = FakeModel(lambda _: None, interface=STREAMING)
    async with serving(model) as (served, channel):
        stream = stream_of(channel)
        name = "triton_enable_empty_final_response"
        await stream.write(request(1, parameters={name: {"bool_param": wants_final}}))
        await stream.write(request(2))
        await until(lambda: len(model.futures) == 2)
        model.readers[1].on_parts([b'"a"'])
        assert text_in(await stream.read()) == "2: a"
        model.readers[0].on_parts([b'"b"', b"3"])
        model.futures[0].set_result(result(b"[]"))
        expected = ["1: b", "1: 3", *(["1:  final"] if wants_final else [])]
        assert [text_in(await stream.read()) for _ in expected] == expected
        model.futures[1].set_exception(InvalidInputError("bad"))
        await stream.done_writing()
        assert text_in(await stream.read()) == "2: bad"
        assert await stream.read() is aio.EOF
        assert served.done == [("fake", 200), ("fake", 422)]


async def test_the_parts_of_several_instances_have_their_numbers():
    model = FakeModel(lambda _: None, interface=STREAMING)
    async with serving(model) as (_, channel):
        stream = stream_of(channel)
        two = {"bytes_contents": [b"a", b"b"]}
        tensor = {"name": "input", "datatype": "BYTES", "shape": [2], "contents": two}
        await stream.write(request(inputs=[tensor]))
        await until(lambda: len(model.futures) == 2)
        model.readers[1].on_parts([b'"x"'])
        answer = (await stream.read()).infer_response
        assert answer.parameters["instance"].int64_param == 1
        stream.cancel()
        await until(lambda: all(each.cancelled() for each in model.futures))


async def test_a_client_that_goes_gives_all_its_requests_up():
    for interface in (Interface(), STREAMING):
        model = FakeModel(lambda _: None, interface=interface)
        async with serving(model) as (served, channel):
            stream = stream_of(channel)
            await stream.write(request())
            await until(lambda model=model: model.futures)
            stream.cancel()
            await until(model.futures[0].cancelled)
            await until(lambda served=served: served.done == [("fake", 499)])


async def test_no_more_requests_are_read_than_may_be_under_way():
    async with serving(model := silent_model()) as (_, channel):
        stream = stream_of(channel)

        async def write_all() -> None:
            for number in range(MAX_UNDER_WAY + 1):
                await stream.write(request(number))
            await stream.done_writing()

        writing = asyncio.create_task(write_all())
        await until(lambda: len(model.futures) == MAX_UNDER_WAY)
        for future in model.futures:
            future.set_result(result(b'"x"'))
        await until(lambda: len(model.futures) > MAX_UNDER_WAY)
        model.futures[-1].set_result(result(b'"x"'))
        await writing
        assert len([answer async for answer in stream]) == MAX_UNDER_WAY + 1


async def test_a_client_that_reads_nothing_loses_its_stream_alone():
    model = FakeModel(lambda _: None, interface=STREAMING)
    async with serving(model, stream_buffer_bytes=2**16) as (_, channel):
        stream, other = stream_of(channel), stream_of(channel)
        await stream.write(request(1))
        await until(lambda: len(model.futures) == 1)
        await other.write(request(2))
        await until(lambda: len(model.futures) == 2)
        part = b'"%b"' % (b"a" * 2**15)
        while not model.futures[0].done():
            model.readers[0].on_parts([part])
            await asyncio.sleep(0)
        error = model.futures[0].exception()
        assert "stream_buffer_bytes = 65536" in str(error)
        model.readers[1].on_parts([b'"x"'])
        assert text_in(await other.read()) == "2: x"
        assert text_in([answer async for answer in _read(stream)][-1]).startswith("1: the client")


async def _read(stream: Any) -> Any:
    await stream.done_writing()
    async for answer in stream:
        yield answer


async def test_a_client_that_reads_no_answer_is_cut_off():
    async with serving(model := silent_model(), write_timeout_s=0.1) as (served, _):
        requests = (request(), request())
        writer = await ask_and_read_nothing(served, "ModelStreamInfer", *requests)
        await until(lambda: len(model.futures) == 2)
        model.futures[0].set_result(result(b'"%b"' % (b"a" * 2**20)))
        await until(model.futures[1].cancelled)
        writer.close()


async def test_a_client_that_reads_on_after_it_was_cut_off_learns_of_it():
    async with serving(model := silent_model(), write_timeout_s=0.1) as (_, channel):
        stream = stream_of(channel)
        for number in range(9):
            await stream.write(request(number))
        await until(lambda: len(model.futures) == 9)
        for future in model.futures[:8]:
            future.set_result(result(b'"%b"' % (b"a" * 2**20)))
        await until(model.futures[8].cancelled)
        with pytest.raises(aio.AioRpcError, match="write_timeout_s"):
            [answer async for answer in stream]


class Body(bytearray):
    """Bytes that a test can look for."""


class FakeContext:
    """A client of one stream, as grpcio shows it; it sends no more, and reads everything."""

    def __init__(self, *messages: Any) -> None:
        self._bodies = [Body(each.SerializeToString()) for each in reversed(messages)]
        self._sent: list[weakref.ref[Body]] = []

    async def read(self) -> Body:
        if not self._bodies:
            await asyncio.Event().wait()
        self._sent.append(weakref.ref(body := self._bodies.pop()))
        return body

    def kept(self) -> list[Body]:
        return [body for each in self._sent if (body := each()) is not None]

    async def write(self, message: bytes) -> None:
        pass

    def time_remaining(self) -> None:
        return None


async def test_answers_in_line_count_as_unread_and_the_bodies_of_their_requests_are_dropped():
    replies = [None, InvalidInputError("bad"), result(b'"%b"' % (b"a" * 10_000))]
    refusals = [None, None, None, OverloadedError("full", retry_after_s=1)]
    model = FakeModel(replies.__getitem__, refusals=refusals)
    extra = {"raw_input_contents": [b"x", b"x"]}
    requests = [request(number) for number in range(4)]
    bad = [
        request(model_name="other", **extra),
        request(**extra),
        REQUEST(model_name="fake", **extra),
    ]
    async with serving(model) as (served, _):
        client = FakeContext(*requests, *bad)
        stream = InferStream(client, served.predict, [], None, 60)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(served.done) == 6)
        model.payloads.clear()  # a real one has copied them
        assert client.kept() == []
        assert served.predict.unread.num_bytes == stream.num_unread_bytes > 10_000
        model.futures[0].set_result(result(b'"x"'))
        await until(lambda: not stream.num_unread_bytes)
        assert served.predict.unread.num_bytes == 0
        running.cancel()


async def test_a_drain_answers_what_has_come_and_ends_the_streams():
    async with serving(model := silent_model()) as (served, channel):
        idle, busy = stream_of(channel), stream_of(channel)
        await busy.write(request())
        await until(lambda: model.futures)
        served.server.begin_drain()
        model.futures[0].set_result(result(b'"x"'))
        assert text_in(await busy.read()) == "0: x final"
        for stream in (idle, busy):
            assert await stream.code() is StatusCode.UNAVAILABLE
