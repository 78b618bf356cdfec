import asyncio
import contextlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from inferpool.models.spec import Interface, TensorSpec
from inferpool.service import errors
from inferpool.service.api.codecs.body import Limits
from inferpool.service.parts.open_inference.grpc.infer import read_request, request_of
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from inferpool.service.settings.draft import read_keys
from inferpool.workers.shared.messages import TensorBlob
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import silent_model, until
from tests.service.parts.open_inference.grpc.serving import (
    Channel,
    ask_and_read_nothing,
    refused,
    serving,
)

KEY = "0123456789abcdef"
FOUR = struct.pack("<4f", 1, 2, 3, 4)
REQUEST = schema().message(INFERENCE, "ModelInferRequest")
SPEC = TensorSpec(name="x", dtype="float32", shape=(-1, 2))


def adding_model(**options: Any) -> FakeModel:
    """A model of two numbers an instance that answers with two."""

    def answer(index: int) -> object:
        return result([TensorBlob("y", "float32", (2,), struct.pack("<2f", index, 10 * index))])

    spec = TensorSpec(name="y", dtype="float32", shape=(-1, 2))
    return FakeModel(answer, inputs=[SPEC], outputs=[spec], **options)


def tensor(
    *, datatype: str = "FP32", shape: Sequence[int] = (2, 2), name: str = "x", **more: Any
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


async def infer(channel: Channel, *inputs: Mapping[str, Any], **fields: Any) -> Any:
    return await channel.ask("ModelInfer", **{"model_name": "fake", "inputs": inputs, **fields})


async def test_raw_and_typed_contents_are_the_same_to_a_model():
    async with serving(model := adding_model()) as (served, channel):
        raw = await infer(channel, tensor(), raw_input_contents=[FOUR], id="7")
        typed = tensor(contents={"fp32_contents": [1, 2, 3, 4]})
        await infer(channel, typed)
        assert model.bodies == [FOUR[:8], FOUR[8:]] * 2
        assert (raw.model_name, raw.model_version, raw.id) == ("fake", "1", "7")
        (output,) = raw.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("y", "FP32", [2, 2])
        assert raw.raw_output_contents[0] == struct.pack("<4f", 0, 0, 1, 10)
        assert served.done == [("fake", 200)] * 2


def test_raw_contents_are_not_copied():
    message = REQUEST(inputs=[tensor()], raw_input_contents=[FOUR]).SerializeToString()
    arrived = read_request(message, Limits())
    assert [(each.obj, bytes(each)) for each in arrived.raw] == [(message, FOUR)]
    assert len(arrived.head.inputs) == 1


@pytest.mark.parametrize(
    ("datatype", "contents", "body"),
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\1\0"),
        ("INT8", {"int_contents": [-1, 2]}, b"\xff\2"),
        ("INT16", {"int_contents": [-1, 2]}, struct.pack("<2h", -1, 2)),
        ("INT32", {"int_contents": [-1, 2]}, struct.pack("<2i", -1, 2)),
        ("INT64", {"int64_contents": [-1, 2]}, struct.pack("<2q", -1, 2)),
        ("UINT8", {"uint_contents": [1, 255]}, b"\1\xff"),
        ("UINT16", {"uint_contents": [1, 2]}, struct.pack("<2H", 1, 2)),
        ("UINT32", {"uint_contents": [1, 2]}, struct.pack("<2I", 1, 2)),
        ("UINT64", {"uint64_contents": [1, 2**64 - 1]}, struct.pack("<2Q", 1, 2**64 - 1)),
        ("FP32", {"fp32_contents": [1, 2]}, struct.pack("<2f", 1, 2)),
        ("FP64", {"fp64_contents": [1, 2]}, struct.pack("<2d", 1, 2)),
        ("BYTES", {"bytes_contents": [b"ab", b"c"]}, b"ab|c"),
    ],
)
def test_each_datatype_has_its_contents(datatype: str, contents: Any, body: bytes):
    message = REQUEST(inputs=[tensor(datatype=datatype, shape=[2], contents=contents)])
    request = request_of(read_request(message.SerializeToString(), Limits()), Limits())
    assert b"|".join(map(bytes, request.inputs[0].chunks)) == body


TYPED = {"contents": {"fp32_contents": [1, 2, 3, 4]}}
BAD: list[dict[str, Any]] = [
    {"inputs": []},
    {"inputs": [tensor(**TYPED)], "raw_input_contents": [FOUR]},
    {"inputs": [tensor()], "raw_input_contents": [FOUR, FOUR]},
    {"inputs": [tensor()], "raw_input_contents": [FOUR[1:]]},
    {"inputs": [tensor()]},
    {"inputs": [tensor(), tensor()], "raw_input_contents": [FOUR, FOUR]},
    {"inputs": [tensor(name="z")], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(datatype="FP31")], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(datatype="FP16", shape=[1, 2])]},
    {"inputs": [tensor(datatype="INT32")], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[2, -2])], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[])], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[1] * 5000)], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[2**62, 2**62])], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[0, 2])], "raw_input_contents": [b""]},
    {"inputs": [tensor(shape=[4])], "raw_input_contents": [FOUR]},
    {"inputs": [tensor(shape=[1000, 2])], "raw_input_contents": [bytes(8000)]},
    {"inputs": [tensor(datatype="INT8", contents={"int_contents": [1, 2, 3, 128]})]},
    {"inputs": [tensor(contents={"fp32_contents": [1.0] * 5})]},
    {"inputs": [tensor(datatype="BYTES", shape=[1], contents={"bytes_contents": [b"a"] * 2})]},
    {"inputs": [tensor(**TYPED, parameters={str(n): {"bool_param": True} for n in range(1025)})]},
    {"inputs": [tensor(datatype="BYTES", shape=[1])], "raw_input_contents": [b"\5\0\0\0ab"]},
    {"inputs": [tensor(datatype="BYTES", shape=[1])], "raw_input_contents": [bytes(8)]},
    {"inputs": [tensor(datatype="BYTES", shape=[10**6])], "raw_input_contents": [bytes(4)]},
    {"inputs": [tensor(parameters={"shared_memory_region": {"string_param": "/dev/shm/x"}})]},
    {"inputs": [tensor()], "raw_input_contents": [FOUR], "outputs": [{"name": "z"}]},
    {
        "inputs": [tensor()],
        "raw_input_contents": [FOUR],
        "parameters": {"timeout": {"string_param": "soon"}},
    },
    {"inputs": [tensor()], "raw_input_contents": [FOUR], "parameters": {"a": {}}},
]


@pytest.mark.parametrize("fields", BAD)
async def test_bad_input_is_an_invalid_argument(fields: dict[str, Any]):
    async with serving(model := adding_model(), max_json_bytes=100_000) as (served, channel):
        code, text = await refused(channel.ask("ModelInfer", model_name="fake", **fields))
        assert (code, bool(text)) == (StatusCode.INVALID_ARGUMENT, True)
        assert model.payloads == []
        assert served.done[0][1] < 500


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 20,
        b"\x0a",
        b"\x0a\x05ab",
        b"\x0a\x02\xff\xff",  # not UTF-8
        b"\x3a\xff\xff\x03",
        b"\x0b",  # a group
        b"\x09\1",
        b"\x32\x00" * 5000,
        b"\x2a\x80\x9a\x0c" + b"a" * 200_000,
    ],
)
async def test_what_is_no_message_is_an_invalid_argument(message: bytes):
    async with serving(adding_model(), max_json_bytes=100_000) as (_, channel):
        call = channel.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert (await refused(call(message, timeout=60)))[0] is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInputError("x"), StatusCode.INVALID_ARGUMENT),
        (errors.OverloadedError("x", retry_after_s=3), StatusCode.RESOURCE_EXHAUSTED),
        (errors.UnavailableError("x"), StatusCode.UNAVAILABLE),
        (errors.DeadlineExceededError("x"), StatusCode.DEADLINE_EXCEEDED),
        (errors.ModelFailedError("x"), StatusCode.INTERNAL),
        (errors.TooLargeError("x"), StatusCode.INVALID_ARGUMENT),
        (RuntimeError("x"), StatusCode.INTERNAL),
    ],
)
async def test_each_error_has_its_status(error: Exception, code: StatusCode):
    async with serving(FakeModel(lambda _: error)) as (_, channel):
        call = channel.call("ModelInfer")(
            channel.method("ModelInfer").request(
                model_name="fake", inputs=[tensor()], raw_input_contents=[FOUR]
            ),
            metadata=[("x-request-id", "abc")],
        )
        assert (await refused(call))[0] is code
        more = dict(await call.trailing_metadata())
        assert more["x-request-id"] == "abc"
        retried = code in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE)
        assert ("retry-after" in more) == retried


async def test_models_and_versions_that_are_not_there_are_not_found():
    async with serving(adding_model()) as (served, channel):
        for name in ("", "other", "fake/infer", "/"):
            code, _ = await refused(infer(channel, tensor(), model_name=name))
            assert code is StatusCode.NOT_FOUND
        code, text = await refused(infer(channel, tensor(), model_version="2"))
        assert (code, "no version '2'" in text) == (StatusCode.NOT_FOUND, True)
        assert served.done == [("unknown", 404)] * 5


async def test_predictions_need_a_key_where_there_are_any():
    async with serving(adding_model(), predict_keys=read_keys(KEY)) as (_, channel):
        assert (await refused(infer(channel, tensor())))[0] is StatusCode.UNAUTHENTICATED
        options = {"metadata": [("authorization", f"Bearer {KEY}")]}
        await infer(channel, tensor(), raw_input_contents=[FOUR], options=options)


async def test_the_deadline_is_that_of_the_call_and_of_its_timeout():
    async with serving(model := silent_model(), max_timeout_s=100.0) as (_, channel):

        async def left(given_s: float, **parameters: int) -> float:
            values = {name: {"int64_param": value} for name, value in parameters.items()}
            call = infer(
                channel, tensor(), raw_input_contents=[FOUR], parameters=values,
                options={"timeout": given_s},
            )  # fmt: skip
            num = len(model.refs)
            task = asyncio.ensure_future(call)
            await until(lambda: len(model.refs) > num)
            task.cancel()
            await until(model.futures[-1].cancelled)
            return model.refs[-1].deadline - time.monotonic()

        assert 40 < await left(50) <= 51
        assert 60 < await left(90, timeout=70_000_000) <= 70
        assert 60 < await left(70, timeout=90_000_000) <= 71  # it travels rounded
        assert 80 < await left(10_000) <= 100


async def test_only_parameters_of_the_model_reach_it():
    given: dict[str, Any] = {
        "beta": {"double_param": 0.5},
        "sequence_id": {"uint64_param": 1},
        "triton_enable_empty_final_response": {"bool_param": True},
        "priority": {"uint64_param": 2},
    }
    async with serving(model := adding_model()) as (_, channel):
        await infer(channel, tensor(), raw_input_contents=[FOUR], parameters=given)
        assert (model.refs[0].parameters, model.refs[0].priority) == (b'{"beta":0.5}', 2)


async def test_outputs_are_classified():
    labelled = adding_model(interface=Interface(labels=("cat", "dog")))
    wanted = [{"name": "y", "parameters": {"classification": {"int64_param": 1}}}]
    async with serving(labelled) as (_, channel):
        answer = await infer(channel, tensor(), raw_input_contents=[FOUR], outputs=wanted)
        (output,) = answer.outputs
        assert (output.datatype, list(output.shape)) == ("BYTES", [2, 1])
        first, second = b"0.000000:0:cat", b"10.000000:1:dog"
        expected = b"".join(struct.pack("<I", len(each)) + each for each in (first, second))
        assert answer.raw_output_contents[0] == expected


async def test_messages_are_compressed_both_ways():
    async with serving(adding_model()) as (_, channel):
        options = {
            "compression": grpc.Compression.Gzip,
            "metadata": [("accept-encoding", "gzip")],
        }
        answer = await infer(channel, tensor(), raw_input_contents=[FOUR], options=options)
        assert len(answer.raw_output_contents[0]) == 16


async def test_answers_that_nobody_reads_have_a_share_of_memory():
    blob = TensorBlob("y", "uint8", (600_000,), bytes(600_000))
    model = FakeModel(lambda _: result([blob]))
    given = {"raw_input_contents": [FOUR]}
    async with serving(model, max_unread_bytes=1_000_000) as (served, channel):
        request = REQUEST(model_name="fake", inputs=[tensor()], **given)
        writer = await ask_and_read_nothing(served, "ModelInfer", request)
        await until(lambda: served.done)
        code, text = await refused(infer(channel, tensor(), **given))
        assert (code, "max_unread_bytes" in text) == (StatusCode.RESOURCE_EXHAUSTED, True)
        writer.close()

        async def is_answered() -> bool:
            with contextlib.suppress(grpc.RpcError):
                await infer(channel, tensor(), **given)
                return True
            return False

        while not await is_answered():
            pass
