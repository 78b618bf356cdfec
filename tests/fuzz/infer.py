"""Hostile inputs of the Open Inference Protocol and of KServe's first one, over HTTP and gRPC."""

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tests.fuzz import dictionary
from tests.fuzz.inputs import HostileInput, RequestMaker
from tests.fuzz.mutate import mutate
from tests.grpc_messages import SERVICE, field, input_tensor, parameter, varint

SIZES = {
    "BOOL": 1, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "UINT8": 1, "UINT16": 2,
    "UINT32": 4, "UINT64": 8, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
_DATATYPES = (*SIZES, "BYTES", "FP8", "fp32", "", "BYTES\0")
_MODELS: Mapping[str, Sequence[tuple[str, str, Sequence[int]]]] = {
    "two": (("x", "FP32", (3,)), ("ids", "INT64", (4,))),
    "grid": (("image", "FP32", (2, 3, 4)),),
    "decoder": (("input", "BYTES", (1,)),),
    "echo": (("input", "BYTES", (1,)),),
}
"""Names, datatypes and shapes of one instance of the inputs of `tests.fuzz.models`."""
_PATHS = (
    *("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/two"),
    *("/v2/models/two/config", "/v2/models/two/stats", "/v2/models/stats", "/v2/models/none"),
    *("/v2/models/two/versions/1", "/v2/models/two/versions/0", "/v2/models/two/versions/x/ready"),
    *("/v2/models/two/versions/99999999999999999999", "/v2/models//infer", "/v2/models/%00/infer"),
    *("/v2/models/two/versions//infer", "/v2/models/two/versions/1/infer", "/v2/models/two/ready"),
    *("/v2/models/%2e%2e/infer", "/v2/models/two/infer/infer", "/v2/models/two%2Fversions%2F1"),
    *("/v2/repository/index", "/v2/repository/models/none/load", "/v2/logging", "/v2/nothing"),
    *("/v2/repository/models/none/unload", "/v2/trace/setting", "/v2/models/two/trace/setting"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/a/register"),
    *("/v2/cudasharedmemory/region/a/register", "/v1/models", "/v1/models/two", "/v1/models/none"),
    *("/v1/models/two:predict:predict", "/v1/models/:predict", "/v1/models/two/versions/1:predict"),
)
_PARAMETERS: Mapping[str, Sequence[Any]] = {
    "priority": (0, 1, 9, 2**64 - 1, 2**64, -1, "1", None, 1.5),
    "timeout": (0, 1, 10**18, -1, "0", 2**63),
    "classification": (0, 1, 3, 2**31, -1, "1", True),
    "binary_data": (True, False, 1, "true", None),
    "binary_data_output": (True, False, 0, "yes", [True]),
    "binary_data_size": (0, 1, 12, 2**63, -1, 1.0, "12"),
    "sequence_id": (1, "a", 2**70), "sequence_start": (True,), "triton_x": (1,),
    "headers": ({}, "a"), "content_type": ("application/json", "image/png", "", 3),
    "shared_memory_region": ("a", "/etc/passwd"), "shared_memory_byte_size": (1,),
    "top_k": (3, -1, "x"), "\ud83d\ude00": (1,), "a" * 300: (1,),
}  # fmt: skip
_HEADER_LENGTHS = (
    *("0", "1", "-1", "", "abc", "1e3", "0x10", "99999999999999999999", "18446744073709551617"),
    *(" 10 ", "10, 10", "10\t", "+5", "5.0"),
)
_PERCENT = {"json": 26, "binary": 26, "squeezed": 12, "raw": 8, "v1": 14, "path": 14}
KINDS = tuple(f"v2-{kind}" for kind in _PERCENT)


def make_infer_input(seed: int, number: int) -> HostileInput:
    """Return the input of a number over HTTP."""
    maker = InferMaker(f"infer-{seed}-{number}")
    kind = maker.choices(list(_PERCENT), list(_PERCENT.values()))[0]
    data = getattr(maker, f"{kind}_call")(number)
    return HostileInput(number=number, kind=f"v2-{kind}", data=data, is_framed=True)


class InferMaker(RequestMaker):
    """Makes one input, by its own stream of random numbers."""

    def json_call(self, number: int) -> bytes:
        """Return a body of JSON alone."""
        model, call = self.document(is_binary=False)
        return self.infer(number, model, self.text_of(call))

    def binary_call(self, number: int) -> bytes:
        """Return JSON with tensors behind it."""
        model, call = self.document(is_binary=True)
        text, tail = self.text_of(call), self.tail(call)
        if self.random() < 0.15:
            tail = mutate(self, tail, [tail])
        return self.infer(number, model, text + tail, self.length_line(len(text)))

    def squeezed_call(self, number: int) -> bytes:
        """Return a body with an encoding, right or not."""
        is_binary = self.random() < 0.5
        model, call = self.document(is_binary=is_binary)
        text = self.text_of(call).replace(b'"timeout"', b'"a"')  # nobody would see it in the bytes
        body = text + self.tail(call) if is_binary else text
        if self.random() < 0.1:
            body = bytes(self.choice((1 << 20, 1 << 24)))
        name = self.choice(("gzip", "gzip", "deflate", "deflate", "identity", "br", "gzip, gzip"))
        squeezes = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}
        squeeze: Callable[[bytes], bytes] = squeezes.get(name, bytes)
        if self.random() < 0.1:
            squeeze = self.choice(list(squeezes.values()))
        squeezed = squeeze(body)
        match self.randrange(8):
            case 0:
                squeezed = squeezed[: self.randrange(len(squeezed) + 1)]
            case 1:
                squeezed = mutate(self, squeezed, [squeezed])
            case 2:
                squeezed += self.choice((b"x", squeezed, bytes(1000)))
            case _:
                pass
        lines = [f"content-encoding: {name}"]
        if is_binary:
            lines.append(self.length_line(len(text)))
        if self.random() < 0.3:
            accepted = self.choice(("gzip", "deflate", "gzip;q=0", "*", "br;q=1, gzip;q=2", ""))
            lines.append(f"accept-encoding: {accepted}")
        return self.infer(number, model, squeezed, *lines)

    def raw_call(self, number: int) -> bytes:
        """Return a body that is one tensor."""
        body = self.randbytes(self.choice((0, 1, 11, 96, 96, 192, 5000)))
        return self.infer(number, self.choice(list(_MODELS)), body, self.length_line(0))

    def v1_call(self, number: int) -> bytes:
        """Return a call of KServe's first protocol."""
        body = self.json_text()
        if self.random() < 0.3:
            value = self.json_value(3)
            body = f'{{"{self.choice(("inputs", "signature_name"))}":{value}}}'.encode(
                "utf-8", "surrogatepass"
            )
        if self.random() < 0.5:
            body = mutate(self, body, [self.json_text()])
        target = f"/v1/models/{self.choice(list(_MODELS))}:predict"
        return self.framed(number, target, self.choice(("application/json", "text/x")), body)

    def path_call(self, number: int) -> bytes:
        """Return a call to any path of the protocols."""
        body = self.choice((b"", b"{}", b"[]", b"{", b'{"ready":true}', b'{"parameters":{"a":1}}'))
        path = self.choice(_PATHS) + self.choice(("", "", "?a=%ff", "/"))
        whole = self.framed(number, path, "application/json", body)
        return whole.replace(b"POST", self.choice((b"GET", b"GET", b"POST", b"PUT", b"DELETE")), 1)

    def infer(self, number: int, model: str, body: bytes, *lines: str) -> bytes:
        """Return a whole request with a body."""
        version = self.choice(("",) * 9 + ("/versions/1", "/versions/7"))
        content_type = self.choice(("application/json", "application/octet-stream", "x/y"))
        target = f"/v2/models/{model}{version}/infer"
        return self.framed(number, target, content_type, body, *lines)

    def length_line(self, num_bytes: int) -> str:
        """Return the header that says how long the JSON is; sometimes it lies."""
        shown = str(num_bytes)
        if self.random() < 0.15:
            near = (str(num_bytes + 1), str(num_bytes - 1))
            shown = self.choice((*_HEADER_LENGTHS, *near))
        return f"inference-header-content-length: {shown}"

    def document(self, *, is_binary: bool) -> tuple[str, dict[str, Any]]:
        """Return a model, and a call of it that is right or nearly."""
        model = self.choice(list(_MODELS))
        rows = self.choice((1, 1, 1, 2, 3, 0, 300))
        inputs = [self.tensor(*each, rows, is_binary) for each in _MODELS[model]]
        call: dict[str, Any] = {"inputs": inputs}
        if self.random() < 0.3:
            call["id"] = self.choice(("a", "", "\r\nx-evil: 1", "n" * 3000, 3, None, "\0"))
        if self.random() < 0.3:
            call["parameters"] = self.parameters()
        if self.random() < 0.3:
            names = ("sum", "twice", "mean", "output", "nothing", "", "\n")
            call["outputs"] = [
                {"name": self.choice(names), "parameters": self.parameters()}
                for _ in range(self.randrange(4))
            ]
        if self.random() < 0.2:
            self.damage(call)
        return model, call

    def tensor(
        self, name: str, datatype: str, shape: Sequence[int], rows: int, is_binary: bool
    ) -> dict[str, Any]:
        """Return an input as JSON; a binary one knows its size, and has no data."""
        if self.random() < 0.08:
            datatype = self.choice(_DATATYPES)
        whole = [rows, *shape]
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": whole}
        if is_binary and self.random() < 0.9:
            size = SIZES.get(datatype, 5) * prod(whole)
            tensor["parameters"] = {"binary_data_size": size}
        elif datatype == "BYTES":
            tensor["data"] = [self.choice(("abcd", "", "\ud800", "/9j/", 3)) for _ in range(rows)]
        else:
            value = self.choice((0, 1, 1, 1, 2, -1, 1.5, 2**70, True, None, "1", 1e400))
            tensor["data"] = [value] * prod(whole)
        if self.random() < 0.05:
            tensor["parameters"] = tensor.get("parameters", {}) | self.parameters()
        return tensor

    def parameters(self) -> dict[str, Any]:
        """Return a few parameters, good and bad."""
        names = self.sample(list(_PARAMETERS), self.randrange(4))
        return {name: self.choice(_PARAMETERS[name]) for name in names}

    def damage(self, value: Any) -> None:
        """Change, add or remove a member somewhere in a document."""
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = self.choice(keys)
            if isinstance(value[key], dict | list) and self.random() < 0.6:
                value = value[key]
                continue
            match self.randrange(4):
                case 0:
                    del value[key]
                case 1 if isinstance(value, dict):
                    value[self.choice(("name", "data", "shape", "x", ""))] = value[key]
                case 2:
                    value[key] = [int(self.choice(dictionary.SIZES[:10])) for _ in range(3)]
                case _:
                    junk = (None, -1, 2**63, 1.5, "", "x", [], {}, [[]], True, [[1], 2], 10**30)
                    value[key] = self.choice(junk)
            return

    def text_of(self, call: object) -> bytes:
        """Return the JSON of a call, sometimes with damaged bytes."""
        text = json.dumps(call).encode()
        return mutate(self, text, [text]) if self.random() < 0.15 else text

    def tail(self, call: Mapping[str, Any]) -> bytes:
        """Return the bytes behind the JSON, as many as it says or nearly."""
        num = 0
        inputs = call.get("inputs")
        for each in inputs if isinstance(inputs, list) else ():
            given = each.get("parameters") if isinstance(each, dict) else None
            size = given.get("binary_data_size") if isinstance(given, dict) else 0
            num += size if isinstance(size, int) and 0 <= size < 1 << 20 else 0
        num += self.choice((0,) * 12 + (1, -1, 100))
        return self.choice((bytes, self.randbytes))(max(0, num))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileCall:
    """A call of gRPC: one message, or several for a stream."""

    number: int
    kind: str
    method: str
    messages: Sequence[bytes]
    is_stream: bool = False
    is_squeezed: bool = False


_UNARY = (
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig"),
    *("ModelStatistics", "RepositoryIndex", "SystemSharedMemoryStatus", "TraceSetting"),
    *("SystemSharedMemoryRegister", "CudaSharedMemoryRegister", "LogSettings", "Nothing"),
)
_CONTENTS = {"BOOL": 1, "INT32": 2, "INT64": 3, "UINT32": 4, "UINT64": 5, "FP32": 6, "FP64": 7}
"""The field of `InferTensorContents` for each datatype; bytes are in 8."""


def make_grpc_call(seed: int, number: int) -> HostileCall:
    """Return the call of a number over gRPC."""
    return GrpcMaker(f"grpc-{seed}-{number}").call(number)


class GrpcMaker(InferMaker):
    """Makes one call of gRPC."""

    def call(self, number: int) -> HostileCall:
        """Return a call of any kind."""
        is_squeezed = self.random() < 0.1
        choice = self.random()
        if choice < 0.15:
            message = field(1, self.choice(("two", "none", "", "\0", "a/b"))) + self.choice(
                (b"", field(2, "1"), field(2, "x"), field(3, 7), b"\x0a", b"\xff" * 9)
            )
            return HostileCall(
                number=number,
                kind="grpc-other",
                method=f"{SERVICE}/{self.choice(_UNARY)}",
                messages=[mutate(self, message, [message])],
            )
        is_stream = choice < 0.3
        messages = [self.message() for _ in range(self.choice((1, 2, 5)) if is_stream else 1)]
        return HostileCall(
            number=number,
            kind="grpc-stream" if is_stream else "grpc-infer",
            method=f"{SERVICE}/{'ModelStreamInfer' if is_stream else 'ModelInfer'}",
            messages=messages,
            is_stream=is_stream,
            is_squeezed=is_squeezed,
        )

    def message(self) -> bytes:
        """Return a `ModelInferRequest` that is right or nearly."""
        model = self.choice(list(_MODELS))
        rows = self.choice((1, 1, 1, 2, 3, 0, 300))
        parts = [
            field(1, model if self.random() < 0.97 else self.choice(("none", "", "\0", "a/b")))
        ]
        if self.random() < 0.1:
            parts.append(field(2, self.choice(("1", "7", "x", "", "99999999999999999999"))))
        if self.random() < 0.2:
            parts.append(field(3, self.choice(("a", "", "n" * 3000, "\r\n"))))
        is_typed = self.random() < 0.35
        for name, datatype, shape in _MODELS[model]:
            parts += self.grpc_tensor(name, datatype, [rows, *shape], is_typed)
        parts += (field(4, self.grpc_parameter()) for _ in range(self.choice((0, 0, 0, 1, 3))))
        if self.random() < 0.2:
            output = field(1, self.choice(("sum", "twice", "mean", "output", "nothing", "")))
            parts.append(field(6, output + field(2, self.grpc_parameter())))
        if self.random() < 0.1:
            self.shuffle(parts)
        if self.random() < 0.08:
            parts.append(field(7, bytes(self.choice((0, 1, 12, 100_000)))))
        whole = b"".join(parts)
        return mutate(self, whole, [whole]) if self.random() < 0.35 else whole

    def grpc_tensor(
        self, name: str, datatype: str, shape: Sequence[int], is_typed: bool
    ) -> list[bytes]:
        """Return the fields of an input: its head, and its raw contents if it is not typed."""
        if self.random() < 0.08:
            datatype = self.choice(_DATATYPES)
        if self.random() < 0.08:
            shape = [*shape[:-1], self.choice((-1, 0, 7, 2**62, -(2**63)))]
        num = prod(shape) if 0 <= prod(shape) < 1 << 16 else 3
        if self.random() < 0.08:
            num = max(0, num + self.choice((-1, 1, 50)))
        extra = [field(4, self.grpc_parameter())] if self.random() < 0.05 else []
        if is_typed:
            place = _CONTENTS.get(datatype, self.choice((1, 2, 6, 8)))
            data = b"".join(varint(self.choice((0, 1, 2**63))) for _ in range(num))
            if place in (6, 7):
                data = bytes(num * (4 if place == 6 else 8))
            contents = field(place, data)
            if datatype == "BYTES" or place == 8:
                contents = b"".join(field(8, self.choice((b"", b"abc"))) for _ in range(num))
            return [field(5, input_tensor(name, datatype, shape, field(5, contents), *extra))]
        if datatype == "BYTES":
            texts = [self.choice((b"", b"abcd", b"\xff\xd8\xff")) for _ in range(num)]
            data = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
        else:
            data = bytes(SIZES.get(datatype, 1) * num)
        if self.random() < 0.05:
            data = mutate(self, data, [data])
        return [field(5, input_tensor(name, datatype, shape, *extra)), field(7, data)]

    def grpc_parameter(self) -> bytes:
        """Return a parameter of some type."""
        name = self.choice([each for each in _PARAMETERS if each.isascii()])
        value = self.choice((True, 0, 1, -1, 2**62, "x", "", "1"))
        return parameter(name, value)
