"""The service answers the calls that real clients send as a real Triton has answered them.

recorded/README.md says what the files are, and how they are made.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict

from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, schema
from tests.clients.compare import difference, reason_of
from tests.clients.models import SETTINGS
from tests.clients.recording import seen, sent_body
from tests.e2e.running import Running, running
from tests.ports import free_port

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).with_name("recorded")
ADMIN = "an-administrators-key"
LOADED = "half_floats"
"""The model that the clients load and unload: whether Triton had it depends on the calls before."""
OURS: dict[str, tuple[str, str]] = {
    r"model ready \w+": (
        r"answer\.answer\.json: .*'ready': True.*, not 'None'",
        "kserve's client reads the JSON",
    ),
    "ready of no (model|version)": ("status 404, not 400", "there is none"),
    "ModelStatistics": (
        r"answer\.answers\[0\]\.(last_inference|inference_stats\.success\.count) is .*",
        "a count or time of 0 is left out, and calls before decide which are",
    ),
    "ModelStreamInfer": (
        r"answer\.answers\[0\]\.infer_response\.outputs\[0\]\.parameters is new: "
        r"\{'content_type': \{'string_param': 'application/json'\}\}",
        "an output says that its texts are JSON",
    ),
    "a stream": (
        r"answer\.answers\[2\]\.infer_response\.model_name is new: 'add_sub'",
        "an error in it names its model",
    ),
}
"""More calls that are answered otherwise on purpose, besides those in `tests.clients.compare`:
patterns of their names and of the first difference, and the reason."""
FILES = sorted(each.name for each in FOLDER.glob("*.jsonl"))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Running, int]]:
    """The models that Triton served, and the port for gRPC."""
    port = free_port()
    settings = {"grpc_port": port, "models": SETTINGS}
    with running(settings=settings, env={"INFERPOOL_ADMIN_KEYS": ADMIN}) as service:
        yield service, port


@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_of_triton_or_their_difference_is_documented(
    served: tuple[Running, int], name: str
):
    service, port = served
    exchanges = [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
    found = {}
    if name.endswith("_grpc.jsonl"):
        with grpc.insecure_channel(f"{service.address[0]}:{port}") as channel:
            answers = [grpc_answer(channel, each) for each in exchanges]
    else:
        with httpx.Client(base_url=service.url, timeout=60) as client:
            answers = [http_answer(client, each) for each in exchanges]
    for theirs, ours in zip(exchanges, answers, strict=True):
        call = theirs["call"]
        said = difference(call, essential(theirs), essential(ours))
        is_meant = reason_of(call, ours) or is_ours(call, said) or is_of_loaded(theirs)
        if said and not is_meant and theirs["status"] is not None:  # Triton has answered
            found[call] = said
    assert found == {}


def is_ours(call: str, said: str) -> bool:
    """Return whether a difference is one of those in `OURS`."""
    return any(
        re.fullmatch(name, call) and re.fullmatch(pattern, said)
        for name, (pattern, _) in OURS.items()
    )


def is_of_loaded(exchange: Mapping[str, Any]) -> bool:
    """Return whether a call is for the model that is loaded and unloaded."""
    sent = b"".join(map(base64.b64decode, exchange.get("requests", ())))
    return LOADED in exchange.get("path", "") or LOADED.encode() in sent


def essential(exchange: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is compared: the status and the answer."""
    return {key: exchange[key] for key in ("status", "answer", "answers") if key in exchange}


def key_of(exchange: Mapping[str, Any]) -> dict[str, str]:
    """Return the header with the administrator's key, for calls that were made with it."""
    return {"x-api-key": ADMIN} if "by the key" in exchange["call"] else {}


def http_answer(client: httpx.Client, exchange: Mapping[str, Any]) -> dict[str, Any]:
    """Send a recorded call over HTTP."""
    headers = {"accept-encoding": "identity", **exchange["headers"], **key_of(exchange)}
    answer = client.request(
        exchange["method"], exchange["path"], content=sent_body(exchange["body"]), headers=headers
    )
    plain = {k: v for k, v in answer.headers.items() if k.lower() != "content-encoding"}
    shown = seen(plain, answer.content)
    shown["encoding"] = answer.headers.get("content-encoding", "")
    return {"status": answer.status_code, "answer": shown}


def grpc_answer(channel: grpc.Channel, exchange: Mapping[str, Any]) -> dict[str, Any]:
    """Send a recorded call over gRPC."""
    method = exchange["method"]
    requests = [base64.b64decode(each) for each in exchange["requests"]]
    metadata = [*key_of(exchange).items()]
    answers: Sequence[bytes]
    try:
        if method.endswith("ModelStreamInfer"):
            stream = channel.stream_stream(method)
            answers = list(stream(iter(requests), timeout=60, metadata=metadata))
        else:
            ask = channel.unary_unary(method)
            answers = [ask(requests[0], timeout=60, metadata=metadata)]
    except grpc.RpcError as error:
        return {"status": error.code().name}
    kind = schema().message(INFERENCE, f"{method.rpartition('/')[2]}Response")
    shown = [
        MessageToDict(kind.FromString(each), preserving_proto_field_name=True) for each in answers
    ]
    return {"status": "OK", "answers": shown}
