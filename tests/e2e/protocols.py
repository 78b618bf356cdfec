"""Clients of a `TensorFaultModel` or a `TextFaultModel`, one for each protocol of a service."""

import asyncio
import contextlib
import itertools
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from tests.e2e.running import Running
from tests.fault_model import ACTS
from tests.grpc_messages import SERVICE, SentTensor, infer_request, outputs_in
from tests.text_model import SCORE_UNIT, floats_of

_PATIENCE_S = 60.0
_STATUSES: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""The status over HTTP that a code of gRPC stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolAnswer:
    """An answer in the words of HTTP."""

    status: int
    twice: int | None = None
    error: str = ""


class FaultClient(ABC):
    """A client of one protocol; it has one call on each connection, or many on the only one."""

    @abstractmethod
    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        """Send one instance.

        Raises:
            httpx.TransportError: There is no answer.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""


class _HttpClient(FaultClient):
    def __init__(self, service: Running) -> None:
        # To read certificates for each client would hold all up for half a second and more.
        self.http = httpx.AsyncClient(base_url=service.url, timeout=_PATIENCE_S, verify=False)

    async def close(self) -> None:
        await self.http.aclose()


class _PredictClient(_HttpClient):
    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        body = {"instances": [{"n": n, "do": ACTS.index(do)}]}
        headers = {} if timeout_ms is None else {"x-timeout-ms": f"{timeout_ms}"}
        answer = await self.http.post(self._path(model), json=body, headers=headers)
        value = answer.json()
        if answer.status_code != 200:
            return ProtocolAnswer(status=answer.status_code, error=self._error(value))
        (prediction,) = value["predictions"]
        return ProtocolAnswer(status=200, twice=prediction["twice"])

    def _path(self, model: str) -> str:
        return f"/predict/{model}"

    def _error(self, value: Mapping[str, str]) -> str:
        return value["detail"]


class _V1Client(_PredictClient):
    def _path(self, model: str) -> str:
        return f"/v1/models/{model}:predict"

    def _error(self, value: Mapping[str, str]) -> str:
        return value["error"]


class _V2Client(_HttpClient):
    """Sends even numbers as JSON, and odd ones as binary tensors."""

    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        values = {"n": n, "do": ACTS.index(do)}
        is_binary = bool(n % 2)
        inputs = [
            {"name": name, "datatype": "INT64", "shape": [1]}
            | ({"parameters": {"binary_data_size": 8}} if is_binary else {"data": [value]})
            for name, value in values.items()
        ]
        parameters = {"binary_data_output": is_binary}
        if timeout_ms is not None:
            parameters["timeout"] = timeout_ms * 1000
        head = json.dumps({"id": f"{n}", "inputs": inputs, "parameters": parameters}).encode()
        headers = {"inference-header-content-length": f"{len(head)}"} if is_binary else {}
        tail = struct.pack("<2q", *values.values()) if is_binary else b""
        path = f"/v2/models/{model}/infer"
        answer = await self.http.post(path, content=head + tail, headers=headers)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert isinstance(error, str)
            return ProtocolAnswer(status=answer.status_code, error=error)
        length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
        value = json.loads(answer.content[:length])
        assert (value["id"], value["model_name"]) == (f"{n}", model)
        twice = next(each for each in value["outputs"] if each["name"] == "twice")
        assert twice["shape"] == [1]
        if is_binary:
            (found,) = struct.unpack_from("<q", answer.content, length)
        else:
            (found,) = twice["data"]
        return ProtocolAnswer(status=200, twice=found)


class _EmbeddingsClient(_HttpClient):
    """Asks for even numbers as floats, and for odd ones in base64."""

    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        form = "base64" if n % 2 else "float"
        body = {"model": "encoder", "input": text_of(n, do, model), "encoding_format": form}
        value, problem = await self._post("/v1/embeddings", body, timeout_ms)
        if problem:
            return problem
        assert (value["model"], value["usage"]["total_tokens"]) == ("encoder", 2)
        (found,) = (each["embedding"] for each in value["data"])
        vector = floats_of(found) if n % 2 else found
        return ProtocolAnswer(status=200, twice=2 * int(vector[0]))

    async def _post(
        self, path: str, body: Mapping[str, object], timeout_ms: int | None
    ) -> tuple[Any, ProtocolAnswer | None]:
        headers = {} if timeout_ms is None else {"x-timeout-ms": f"{timeout_ms}"}
        answer = await self.http.post(path, json=body, headers=headers)
        value = answer.json()
        if answer.status_code == 200:
            return value, None
        error = self._error(value)
        assert isinstance(error, str)
        return None, ProtocolAnswer(status=answer.status_code, error=error)

    def _error(self, value: Any) -> str:
        assert isinstance(value["error"]["type"], str)
        return str(value["error"]["message"])


class _RerankClient(_EmbeddingsClient):
    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        texts = [text_of(n, do, model)]
        body = {"model": "reranker", "query": "which number?", "documents": texts}
        value, problem = await self._post("/v2/rerank", body, timeout_ms)
        if problem:
            return problem
        (found,) = value["results"]
        assert found["index"] == 0
        return ProtocolAnswer(status=200, twice=int(2 * found["relevance_score"] * SCORE_UNIT))

    def _error(self, value: Any) -> str:
        return str(value["message"])


class _TeiClient(_EmbeddingsClient):
    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        body = {"inputs": text_of(n, do, model), "normalize": False}
        value, problem = await self._post("/tei/encoder/embed", body, timeout_ms)
        if problem:
            return problem
        (vector,) = value
        return ProtocolAnswer(status=200, twice=2 * int(vector[0]))

    def _error(self, value: Any) -> str:
        assert isinstance(value["error_type"], str)
        return str(value["error"])


class _TorchServeClient(_HttpClient):
    """Asks an archive: by `/predictions` with even numbers, and with odd ones by another path."""

    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        act = "exit" if (do, model) == ("kill", "poisoned") else do
        headers = {} if timeout_ms is None else {"x-timeout-ms": f"{timeout_ms}"}
        path = "/archive/predict" if n % 2 else "/predictions/archive"
        answer = await self.http.post(path, json={"n": n, "do": act}, headers=headers)
        value = answer.json()
        if answer.status_code == 200:
            return ProtocolAnswer(status=200, twice=value["twice"])
        assert value["code"] == answer.status_code
        assert isinstance(value["type"], str)
        return ProtocolAnswer(status=answer.status_code, error=str(value["message"]))


class _SageMakerClient(_PredictClient):
    """Asks the default model, whatever name it is told."""

    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        act = "exit" if (do, model) == ("kill", "poisoned") else do
        return await super().ask(n, act, model=model, timeout_ms=timeout_ms)

    def _path(self, model: str) -> str:
        return "/invocations"

    def _error(self, value: Mapping[str, str]) -> str:
        assert isinstance(value["code"], int)
        assert value["type"]
        return value["message"]


class _VertexClient(_SageMakerClient):
    def _path(self, model: str) -> str:
        return VERTEX_ROUTE

    def _error(self, value: Mapping[str, str]) -> str:
        return value["error"]


class _GrpcClient(FaultClient):
    """Has one channel. Odd deadlines are sent as gRPC's own, even ones as a parameter."""

    def __init__(self, service: Running, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"{service.address[0]}:{port}")
        self._infer = self._channel.unary_unary(f"{SERVICE}/ModelInfer")

    async def ask(
        self, n: int, do: str = "ok", *, model: str = "m", timeout_ms: int | None = None
    ) -> ProtocolAnswer:
        values = {"n": n, "do": ACTS.index(do)}
        tensors = {k: SentTensor("INT64", [1], struct.pack("<q", v)) for k, v in values.items()}
        is_own = timeout_ms is not None and timeout_ms % 2 == 1
        parameters = {} if is_own or timeout_ms is None else {"timeout": timeout_ms * 1000}
        request = infer_request(model, tensors, parameters, request_id=f"{n}")
        timeout_s = timeout_ms / 1000 if is_own and timeout_ms is not None else _PATIENCE_S
        try:
            answer = await self._infer(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return ProtocolAnswer(status=_STATUSES[error.code()], error=error.details() or "")
        (found,) = struct.unpack("<q", outputs_in(answer)["twice"].data)
        return ProtocolAnswer(status=200, twice=found)

    async def close(self) -> None:
        await self._channel.close()


_KINDS = {
    "predict": _PredictClient, "v2": _V2Client, "v1": _V1Client,
    "embeddings": _EmbeddingsClient, "rerank": _RerankClient, "tei": _TeiClient,
    "torchserve": _TorchServeClient, "sagemaker": _SageMakerClient, "vertex": _VertexClient,
}  # fmt: skip
PROTOCOLS = ("predict", "v2", "v1", "grpc", "embeddings", "rerank", "tei", "torchserve")
PLATFORMS = ("sagemaker", "vertex")
"""Protocols of a service of their own: TorchServe and SageMaker exclude each other."""
ONLY_MODELS = {
    "embeddings": "encoder", "rerank": "reranker", "tei": "encoder", "torchserve": "archive",
    "sagemaker": "invoked", "vertex": "invoked",
}  # fmt: skip
"""The only models of some protocols, whatever name is asked for."""
VERTEX_ROUTE = "/v1/endpoints/1:predict"


def text_of(n: int, do: str, model: str) -> str:
    """Return the text of an act; their model spares nothing that is for "poisoned"."""
    return f"exit {n}" if (do, model) == ("kill", "poisoned") else f"{do} {n}"


def model_of(protocol: str, name: str) -> str:
    """Return the model that a client of a protocol asks, if it is told a name."""
    return ONLY_MODELS.get(protocol, name)


@contextlib.asynccontextmanager
async def client_of(protocol: str, service: Running, grpc_port: int) -> AsyncIterator[FaultClient]:
    """Open a client of a protocol for the block."""
    client: FaultClient = (
        _GrpcClient(service, grpc_port) if protocol == "grpc" else _KINDS[protocol](service)
    )
    try:
        yield client
    finally:
        await client.close()


@dataclass(slots=True)
class ProtocolTally:
    """Counts of what became of the numbers that clients of one protocol have asked."""

    right: int = 0
    wrong: list[tuple[int, ProtocolAnswer]] = field(default_factory=list)
    lost: int = 0
    """Numbers without an answer."""


@contextlib.asynccontextmanager
async def asking_by_all(
    service: Running,
    grpc_port: int,
    protocols: Sequence[str] = PROTOCOLS,
    num_clients: int = 2,
) -> AsyncIterator[Mapping[str, ProtocolTally]]:
    """Have clients of every protocol ask during the block, each the next when it has an answer."""
    tallies = {protocol: ProtocolTally() for protocol in protocols}
    numbers = itertools.count(1)
    is_over = asyncio.Event()

    async def be(protocol: str) -> None:
        tally = tallies[protocol]
        async with client_of(protocol, service, grpc_port) as client:
            while not is_over.is_set():
                n = next(numbers)
                try:
                    answer = await client.ask(n)
                except httpx.TransportError:
                    tally.lost += 1
                    continue
                if answer == ProtocolAnswer(status=200, twice=2 * n):
                    tally.right += 1
                else:
                    tally.wrong.append((n, answer))

    async with asyncio.TaskGroup() as group:
        for protocol in [*protocols] * num_clients:
            group.create_task(be(protocol))
        try:
            yield tallies
        finally:
            is_over.set()


async def until_each_has(tallies: Mapping[str, ProtocolTally], num_more: int) -> None:
    """Wait until clients of each protocol have had more right answers."""
    least = {protocol: tally.right + num_more for protocol, tally in tallies.items()}
    async with asyncio.timeout(_PATIENCE_S):
        while any(tallies[protocol].right < num for protocol, num in least.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
