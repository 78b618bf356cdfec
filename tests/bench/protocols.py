"""`protocols`: the same tensor of bytes by each protocol, against `/predict` with raw bytes.

The model gives back the first four bytes, so that only the way of the tensor costs anything. Over
HTTP the generator is that of `bodies`. Over gRPC it is grpcio's client, which costs far more than
the service: compare the service's CPU, not the rate.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial

from inferpool.service.tools.trial.connection import post_request
from tests.bench.bodies import load_by
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.grpc_sender import send_messages
from tests.bench.models import FIRST_BYTES
from tests.bench.senders import BodyLoad, send_bodies
from tests.bench.server import BenchServer, inferpool
from tests.grpc_messages import SentTensor, infer_request

_ENV = {"INFERPOOL_ARENA_BYTES": str(256 << 20)}
_BASE = "predict"


@benchmark(
    "a tensor of bytes by each protocol, against /predict with raw bytes",
    rounds=5,
    secs=3.0,
    warm=0.5,
    connections=(16, 64),
    serve_args="--replicas 1 --speed exact",
    bytes=(150_528, "size of the tensor"),
)
def protocols(bench: Benchmark) -> None:
    """Load one service by each protocol in turn."""
    args = bench.args
    settings = {"grpc_port": args.port + 1, "models.m.source": FIRST_BYTES}
    command = inferpool(args, name="protocols", settings=settings, env=_ENV)
    with BenchServer(command, args.port) as server:
        server.wait_ready()
        calls = {**_requests(args.bytes), "v2 gRPC": b""}
        bench.take_turns({name: partial(_load, bench, server, name, calls[name]) for name in calls})
    bench.report("connections", "CPU in microseconds per call.")
    figures = ("calls_per_s", "service_us", "main_us", "workers_us")
    bench.report_ratios("connections", figures, lambda name: name == _BASE)


def _load(
    bench: Benchmark, server: BenchServer, name: str, request: bytes, _: int
) -> Iterator[Cell]:
    args = bench.args
    for connections in args.connections:
        load = BodyLoad(
            port=server.port if request else args.port + 1,
            request=request or _message(args.bytes),
            connections=int(connections),
            warm_s=args.warm,
            secs=args.secs,
            ending=b"" if "binary" in name else b"]}",
        )
        figures = load_by(server, load, send_bodies if request else send_messages)
        yield Cell(f"{args.bytes} bytes", name, connections, figures)


def _requests(num_bytes: int) -> Mapping[str, bytes]:
    """Return whole HTTP requests by the name of their form."""
    data = bytes(num_bytes)
    tensor = {"name": "bytes", "datatype": "UINT8", "shape": [1, num_bytes]}
    binary = {**tensor, "parameters": {"binary_data_size": num_bytes}}
    found = {}
    octets = "application/octet-stream"
    shape = {"X-Tensor-Dtype": "uint8", "X-Tensor-Shape": f"{num_bytes}"}
    found[_BASE] = post_request("/predict/m", data, octets, shape)
    path = "/v2/models/m/infer"
    for name, wants_binary in (("v2 binary", True), ("v2 in", False)):
        call = {"inputs": [binary], "parameters": {"binary_data_output": wants_binary}}
        head = json.dumps(call).encode()
        lines = {"Inference-Header-Content-Length": f"{len(head)}"}
        found[name] = post_request(path, head + data, octets, lines)
    raw = {"Inference-Header-Content-Length": "0"}
    found["v2 binary raw"] = post_request(path, data, octets, raw)
    text = json.dumps({"inputs": [{**tensor, "data": list(data)}]}, separators=(",", ":"))
    found["v2 JSON"] = post_request(path, text.encode(), "application/json")
    return found


def _message(num_bytes: int) -> bytes:
    return infer_request("m", {"bytes": SentTensor("UINT8", [1, num_bytes], bytes(num_bytes))})
