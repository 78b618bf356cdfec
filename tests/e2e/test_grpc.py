"""gRPC of a real service, with several front ends and with one, until it is stopped."""

import contextlib
import json
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inferpool.service.parts.open_inference.grpc.schema import schema
from tests.e2e.running import FAULTY, Running, running, until

SERVICE = "inference.GRPCInferenceService"
ADMIN_KEY = "0123456789-admin"
METHODS = {each.name: each for each in schema().methods(SERVICE)}
STREAM = {"source": "tests.streaming_model:CountingStream", "replicas": 1}


class Stub:
    """The methods of the service by name, each given the fields of its request."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        method = METHODS[name]
        options = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": method.response.FromString,
        }
        if method.is_server_streaming:
            return self._channel.stream_stream(f"/{SERVICE}/{name}", **options)
        call = self._channel.unary_unary(f"/{SERVICE}/{name}", **options)

        def ask(*, metadata: Any = (), future: bool = False, **fields: Any) -> Any:
            made = call.future if future else call
            return made(method.request(**fields), timeout=60, metadata=metadata)

        return ask


@contextlib.contextmanager
def stub_of(service: Running) -> Iterator[Stub]:
    with grpc.insecure_channel(service.told_after("gRPC is served at ")) as channel:
        yield Stub(channel)


def json_input(value: object) -> dict[str, Any]:
    kind = {"content_type": {"string_param": "application/json"}}
    contents = {"bytes_contents": [json.dumps(value).encode()]}
    return {
        "name": "input", "datatype": "BYTES", "shape": [1, 1], "contents": contents,
        "parameters": kind,
    }  # fmt: skip


def code_of(ask: Any, **fields: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        ask(**fields)
    return caught.value.code()


def test_it_serves_what_the_front_ends_serve():
    sums = {"source": "tests.open_inference_model:RowSums", "replicas": 1}
    settings = {"models": {"sums": sums, "stream": STREAM}, "front_ends": 2, "grpc_port": 0}
    environ = {"INFERPOOL_ADMIN_KEYS": ADMIN_KEY}
    with running(settings=settings, env=environ) as service, stub_of(service) as stub:
        check_tensors(service, stub)
        check_descriptions(stub)
        check_parts(stub)
        check_repository(stub)


def check_tensors(service: Running, stub: Stub) -> None:
    width = 100_000
    data = struct.pack(f"<{2 * width}f", *[1] * width, *[2] * width)
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, width]}
    answer = stub.ModelInfer(model_name="sums", inputs=[tensor], raw_input_contents=[data], id="7")
    assert (answer.id, list(answer.outputs[0].shape)) == ("7", [2, 2])
    assert struct.unpack("<4f", answer.raw_output_contents[0]) == (width, 1, 2 * width, 2)
    bad = {"inputs": [tensor], "raw_input_contents": [data[:-1]]}
    refused = code_of(stub.ModelInfer, model_name="sums", **bad)
    assert refused is grpc.StatusCode.INVALID_ARGUMENT


def check_descriptions(stub: Stub) -> None:
    assert stub.ServerMetadata().name == "inferpool"
    assert (stub.ModelReady(name="sums").ready, stub.ModelReady(name="x").ready) == (True, False)
    (given,) = stub.ModelMetadata(name="sums").inputs
    assert (given.name, given.datatype, list(given.shape)) == ("x", "FP32", [-1, 100_000])
    config = stub.ModelConfig(name="sums", version="1").config
    assert (config.max_batch_size > 0, list(config.input[0].dims)) == (True, [100_000])
    assert stub.ModelConfig(name="stream").config.model_transaction_policy.decoupled
    statistics = stub.ModelStatistics(name="sums").model_stats[0]
    assert statistics.inference_count == 2
    assert code_of(stub.ModelMetadata, name="x") is grpc.StatusCode.NOT_FOUND


def check_parts(stub: Stub) -> None:
    plans: list[dict[str, object]] = [{"n": 7, "parts": 2}, {"n": 1, "do": "raise", "at": 1}]
    requests = [
        METHODS["ModelInfer"].request(
            model_name="stream", id=str(plan["n"]), inputs=[json_input(plan)]
        )
        for plan in plans
    ]
    found: dict[str, list[str]] = {}
    for answer in stub.ModelStreamInfer(iter(requests), timeout=60):
        texts = [each[4:].decode() for each in answer.infer_response.raw_output_contents]
        found.setdefault(answer.infer_response.id, []).extend(texts or [answer.error_message])
    assert found["7"] == ["7", "8"]
    assert (found["1"][0], "forward raised ValueError" in found["1"][1]) == ("1", True)


def check_repository(stub: Stub) -> None:
    key = [("x-api-key", ADMIN_KEY)]

    def states() -> dict[str, str]:
        return {each.name: each.state for each in stub.RepositoryIndex().models}

    assert states() == {"stream": "READY", "sums": "READY"}
    refused = code_of(stub.RepositoryModelUnload, model_name="sums")
    assert refused is grpc.StatusCode.UNAUTHENTICATED
    stub.RepositoryModelUnload(model_name="sums", metadata=key)
    assert states() == {"stream": "READY", "sums": "UNAVAILABLE"}
    given = {"config": {"string_param": "{}"}}
    refused = code_of(stub.RepositoryModelLoad, model_name="sums", metadata=key, parameters=given)
    assert refused is grpc.StatusCode.INVALID_ARGUMENT
    stub.RepositoryModelLoad(model_name="sums", metadata=key)
    assert states() == {"stream": "READY", "sums": "READY"}
    for name in ("SystemSharedMemoryRegister", "CudaSharedMemoryStatus", "TraceSetting"):
        assert code_of(getattr(stub, name)) is grpc.StatusCode.INVALID_ARGUMENT


def test_what_was_accepted_is_answered_before_it_stops(tmp_path: Path):
    gate = tmp_path / "gate"
    faulty = {"source": FAULTY, "replicas": 1, "options": {"gate": str(gate)}}
    settings = {"models": {"faulty": faulty}, "front_ends": 1, "grpc_port": 0}
    with running(settings=settings) as service, stub_of(service) as stub:
        gate.touch()
        waiting = json_input({"n": 4, "do": "wait"})
        call = stub.ModelInfer(model_name="faulty", inputs=[waiting], future=True)
        until(lambda: service.metric('instances_in_flight{model="faulty"}') == 1)
        stream = stub.ModelStreamInfer(iter(()), timeout=60)
        service.signal(signal.SIGTERM)
        service.wait_for_log("stopping")
        gate.unlink()
        assert struct.unpack("<q", call.result().raw_output_contents[0]) == (8,)
        assert service.wait() == 0
        assert stream.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
