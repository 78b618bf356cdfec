import socket

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import StatusCode, aio

from inferpool.service.api.wire.budgets import UnfinishedRequests
from inferpool.service.errors import StartError
from inferpool.service.parts.open_inference.grpc.schema import HEALTH, REFLECTION
from inferpool.service.parts.open_inference.grpc.server import hold_port
from inferpool.service.settings.draft import read_keys
from inferpool.workers.shared.messages import TensorBlob
from tests.certificates import make_certificate
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import silent_model, until
from tests.service.parts.open_inference.grpc.serving import (
    Channel,
    ask_and_read_nothing,
    refused,
    serving,
)

KEY = "0123456789abcdef"
HEALTH_SERVICE = f"{HEALTH}.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


async def test_it_is_live_and_ready_until_the_service_is_not():
    async with serving() as (served, channel):
        assert (await channel.ask("ServerLive")).live
        assert (await channel.ask("ServerReady")).ready
        served.ready[""] = False
        assert not (await channel.ask("ServerReady")).ready


async def test_health_is_that_of_the_server_and_of_each_model():
    async with serving(FakeModel(name="a")) as (served, channel):
        served.ready["a"] = False

        async def check(service: str) -> int:
            return int((await channel.ask("Check", HEALTH_SERVICE, service=service)).status)

        assert [await check(name) for name in ("", "inference.GRPCInferenceService", "a")] == [
            SERVING, SERVING, NOT_SERVING,
        ]  # fmt: skip
        assert (await refused(check("b")))[0] is StatusCode.NOT_FOUND
        statuses = (await channel.ask("List", HEALTH_SERVICE)).statuses
        assert {name: each.status for name, each in statuses.items()} == {
            "": SERVING, "inference.GRPCInferenceService": SERVING, "a": NOT_SERVING,
        }  # fmt: skip
        request = channel.method("Watch", HEALTH_SERVICE).request
        watch = channel.call("Watch", HEALTH_SERVICE)(request(service="a"))
        unknown = channel.call("Watch", HEALTH_SERVICE)(request(service="b"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await unknown.read()).status == SERVICE_UNKNOWN
        served.ready["a"] = True
        assert (await watch.read()).status == SERVING
        served.server.begin_drain()
        assert await watch.read() is aio.EOF


async def test_reflection_describes_all_services():
    async with serving() as (_, channel):
        ask = channel.method("ServerReflectionInfo", f"{REFLECTION}.ServerReflection").request
        stream = channel.call("ServerReflectionInfo", f"{REFLECTION}.ServerReflection")()

        async def answer(**question: str) -> object:
            await stream.write(ask(**question))
            return await stream.read()

        listed = (await answer(list_services="")).list_services_response.service
        names = [each.name for each in listed]
        assert names[0] == "inference.GRPCInferenceService"
        pool = DescriptorPool()
        for name in names:
            found = (await answer(file_containing_symbol=name)).file_descriptor_response
            for file in found.file_descriptor_proto:
                pool.AddSerializedFile(file)
        methods = pool.FindServiceByName(names[0]).methods
        assert {each.name for each in methods} >= {"ModelInfer", "ModelStreamInfer"}
        assert (await answer(file_by_filename="inference/inference.proto")).HasField(
            "file_descriptor_response"
        )
        for question in ({"file_by_filename": "x"}, {"all_extension_numbers_of_type": "x"}):
            assert (await answer(**question)).error_response.error_code == 5


async def test_other_methods_and_messages_are_refused():
    async with serving(max_body_bytes=2048) as (_, channel):
        call = channel.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
        assert (await refused(call(b"", timeout=60)))[0] is StatusCode.UNIMPLEMENTED
        call = channel.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert await refused(call(b"\x0f", timeout=60)) == (
            StatusCode.INVALID_ARGUMENT, "the message is no ServerLiveRequest",
        )  # fmt: skip
        assert (await refused(call(bytes(2049), timeout=60)))[0] is StatusCode.RESOURCE_EXHAUSTED
        bomb = call(bytes(2**24), compression=grpc.Compression.Gzip, timeout=60)
        assert (await refused(bomb))[0] is StatusCode.RESOURCE_EXHAUSTED
        silent = channel.channel.stream_unary("/inference.GRPCInferenceService/ServerLive")
        assert (await refused(silent(iter(()), timeout=60)))[0] is StatusCode.INVALID_ARGUMENT


async def test_the_key_of_a_call_is_checked_before_its_message_comes():
    async with serving(metrics_keys=read_keys(KEY)) as (_, channel):
        assert (await channel.ask("ServerLive")).live
        assert (await channel.ask("Check", HEALTH_SERVICE)).status == SERVING
        # Nothing of the message is ever sent.
        call = channel.channel.stream_unary(f"/{HEALTH_SERVICE}/List")
        code, text = await refused(call(timeout=60))
        assert (code, "needs a key" in text) == (StatusCode.UNAUTHENTICATED, True)
        for key in (("x-api-key", KEY), ("authorization", f"Bearer {KEY}")):
            assert await channel.ask("List", HEALTH_SERVICE, options={"metadata": [key]})
        wrong = channel.ask("List", HEALTH_SERVICE, options={"metadata": [("x-api-key", "x" * 20)]})
        assert (await refused(wrong))[0] is StatusCode.UNAUTHENTICATED


async def test_each_key_has_its_share_of_calls(monkeypatch):
    monkeypatch.setattr("inferpool.service.parts.open_inference.grpc.server.MAX_CALLS", 4)
    keys = read_keys(f"{KEY},{KEY[::-1]}")
    async with serving(model := silent_model(), predict_keys=keys, per_key_share=0.5) as (
        _,
        channel,
    ):
        request = channel.method("ModelInfer").request
        tensor = {"name": "x", "datatype": "UINT8", "shape": [1]}
        given = request(model_name="fake", inputs=[tensor], raw_input_contents=[b"x"])

        def ask(key: str) -> aio.UnaryUnaryCall:
            return channel.call("ModelInfer")(given, metadata=[("x-api-key", key)])

        calls = [ask(KEY) for _ in range(2)]
        await until(lambda: len(model.futures) == 2)
        code, text = await refused(ask(KEY))
        assert (code, "per_key_share" in text) == (StatusCode.RESOURCE_EXHAUSTED, True)
        calls.append(ask(KEY[::-1]))
        await until(lambda: len(model.futures) == 3)
        for call in calls:
            call.cancel()
        await until(lambda: all(each.cancelled() for each in model.futures))


async def test_methods_for_operators_are_not_there_without_their_keys():
    async with serving() as (_, channel):
        code, text = await refused(channel.ask("RepositoryModelLoad", model_name="fake"))
        assert (code, "no admin key" in text) == (StatusCode.NOT_FOUND, True)


async def test_messages_that_come_slowly_have_room_for_some():
    async with serving(soon_s=0.0, max_body_bytes=2048) as (served, channel):
        served.predict.unfinished = UnfinishedRequests(2 * 2048, lambda: 0.0)
        calls = []
        for num in (1, 2):
            calls.append(
                channel.channel.stream_unary("/inference.GRPCInferenceService/ServerLive")()
            )
            await until(lambda num=num: served.predict.unfinished.num_bytes == num * 2048)
        third = channel.channel.stream_unary("/inference.GRPCInferenceService/ServerLive")()
        code, text = await refused(third)
        assert (code, "max_unfinished_bytes" in text) == (StatusCode.RESOURCE_EXHAUSTED, True)
        assert dict(await third.trailing_metadata())["retry-after"] == "1"
        calls.pop().cancel()
        await until(lambda: served.predict.unfinished.num_bytes == 2048)
        assert (await channel.ask("ServerLive")).live


async def test_tls_is_that_of_the_service(tmp_path):
    certificate, key = make_certificate(tmp_path)
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    async with serving(**files) as (served, plain):
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with aio.secure_channel(f"localhost:{served.server.port}", credentials) as channel:
            assert (await Channel(channel).ask("ServerLive")).live
        assert (await refused(plain.ask("ServerLive")))[0] is StatusCode.UNAVAILABLE


async def test_a_port_in_use_is_an_error_of_the_start():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"listen on 127.0.0.1:{port}.*--grpc-port"):
            hold_port("127.0.0.1", port)
    (held,) = hold_port("127.0.0.1", 0)
    with held, pytest.raises(StartError, match="in use"):
        hold_port("127.0.0.1", held.getsockname()[1])
    async with serving() as (served, _):
        with pytest.raises(StartError, match="in use"):
            hold_port("127.0.0.1", served.server.port)


async def test_all_addresses_of_ipv4_are_none_of_ipv6():
    async with serving(host="0.0.0.0") as (served, _):
        port = served.server.port
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert (await Channel(channel).ask("ServerLive")).live
        async with aio.insecure_channel(f"[::1]:{port}") as channel:
            asked = refused(Channel(channel).ask("ServerLive"))
            assert (await asked)[0] is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("is_hurried", [True, False])
async def test_a_stop_waits_little_for_clients_that_do_not_read(is_hurried: bool):
    blob = TensorBlob("y", "uint8", (2**20,), bytes(2**20))
    model = FakeModel(lambda _: result([blob]))
    async with serving(model, drain_timeout_s=3000) as (served, channel):
        tensor = {"name": "x", "datatype": "UINT8", "shape": [1]}
        request = channel.method("ModelInfer").request
        given = request(model_name="fake", inputs=[tensor], raw_input_contents=[b"x"])
        writer = await ask_and_read_nothing(served, "ModelInfer", given)
        await until(lambda: served.done)
        served.server.begin_drain()
        served.is_hurried = is_hurried
        await served.server.stop()
        writer.close()
