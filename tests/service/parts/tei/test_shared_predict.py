"""`/predict` with Text Embeddings Inference beside it: all calls of ours are as without."""

import io
import json
from typing import Any

import numpy as np
import pytest

from inferpool.models.spec import Interface, TensorSpec, TextFacts
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.workers.shared.messages import TensorBlob
from tests.service.api.fakes import FakeModel, body_of, result
from tests.service.api.server import RawAnswer, serve

FORM = b"multipart/form-data; boundary=b"
ONE_PER_CALL = ("x-request-id", "traceparent", "date", "server-timing")
BOTH = b'{"instances": [1, {"inputs": 2}, "\\"inputs\\""], "parameters": {"inputs": 3}}'
LONG = b'{"inputs": "%b"}' % (b"a" * 500_000)
NUMBERS = np.arange(4, dtype=np.float32)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, NUMBERS)
    return file.getvalue()


PART = b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\nabc\r\n--b--\r\n'
CALLS: dict[str, tuple[bytes, bytes, bytes]] = {
    "picture": (b"", b"content-type: image/png\r\n", b"\x89PNG\r\n\x1a\n"),
    "large picture": (b"", b"content-type: image/png\r\n", b"\x89PNG\r\n\x1a\n" + bytes(300_000)),
    "json": (b"", b"content-type: application/json\r\n", BOTH),
    "json with a parameter": (b"?k=3", b"content-type: application/json; a=b\r\n", BOTH),
    "untyped json": (b"", b"", BOTH),
    "json of curl": (b"", b"content-type: application/x-www-form-urlencoded\r\n", BOTH),
    "json in pieces": (b"", b"content-type: application/json\r\n", BOTH + b" " * 300_000),
    "instances win later": (b"", b"", b'{"inputs": "a", "instances": [1]}'),
    "instances win": (b"", b"", b'{"instances": [1], "inputs": "a"}'),
    "no json": (b"", b"content-type: application/json\r\n", b'{"inputs": '),
    "long json": (b"", b"content-type: application/json\r\n", LONG),
    "another object": (b"", b"content-type: application/json\r\n", b'{"x": {"inputs": 1}}'),
    "a list": (b"", b"content-type: application/json\r\n", b'["inputs"]'),
    "empty": (b"", b"content-type: application/json\r\n", b""),
    "bytes": (b"", b"content-type: application/octet-stream\r\n", b'{"inputs": "a"}'),
    "text": (b"", b"content-type: text/plain\r\n", b'{"inputs": "a"}'),
    "tensor": (
        b"?dtype=float32&shape=4",
        b"content-type: application/octet-stream\r\n",
        NUMBERS.tobytes(),
    ),
    "untyped tensor": (
        b"",
        b"x-tensor-dtype: uint8\r\nx-tensor-shape: 15\r\n",
        b'{"inputs": "a"}',
    ),
    "npy": (b"", b"content-type: application/x-npy\r\n", npy()),
    "form": (b"", b"content-type: %b\r\n" % FORM, PART),
    "unknown type": (b"", b"content-type: application/x-other\r\n", b"x"),
    "compressed": (b"", b"content-type: application/json\r\ncontent-encoding: gzip\r\n", BOTH),
    "tensors wanted": (b"", b"accept: application/x-npy\r\ncontent-type: image/png\r\n", b"x"),
    "tensors wanted for json": (b"", b"accept: application/x-npy\r\n", b'{"instances": [1]}'),
    "an answer nobody has": (b"", b"accept: text/html\r\ncontent-type: image/png\r\n", b"x"),
    "a bad timeout": (b"", b"x-timeout-ms: soon\r\ncontent-type: image/png\r\n", b"x"),
}  # fmt: skip


def answers_by_type(model: FakeModel) -> None:
    """Have a model answer with a tensor where one is wanted, and else with a number."""
    blob = TensorBlob("x", "float32", (2,), np.ones(2, np.float32).tobytes())
    model._reply = lambda index: result([blob] if model.refs[index].wants_tensors else b"7")


def shown(answer: RawAnswer) -> tuple[int, dict[str, str], bytes]:
    """An answer without all that each has of its own."""
    headers = {name: each for name, each in answer.headers.items() if name not in ONE_PER_CALL}
    body = answer.body
    if answer.status >= 400:
        body = body.replace(answer.headers["x-request-id"].encode(), b"ID")
    return answer.status, headers, body


async def asked(call: bytes, optional: list[str], interface: Interface) -> list[Any]:
    """Send a call three times, so that its head is known, and return all that can be seen of it."""
    model = FakeModel(outputs=[TensorSpec(name="x", dtype="float32", shape=(2,))])
    model.interface = interface
    answers_by_type(model)
    async with serve(model, max_json_bytes=400_000, max_instances=8) as server:
        server.protocol.predict.optional = [CALLS_BY_SETTING[each] for each in optional]
        async with server.connect() as client:
            seen: list[Any] = [shown(await client.ask(call)) for _ in range(3)]
        forms = [known.call.form for known in server.protocol.known_heads.values()]
    seen += [(each.kind, body_of(each), each.headers) for each in model.payloads]
    seen += [(ref.wants_tensors, ref.wants_content, ref.parameters) for ref in model.refs]
    return [*seen, forms if model.payloads else None]


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_of_ours_is_answered_as_without(name: str) -> None:
    query, headers, body = CALLS[name]
    length = b"content-length: %d\r\n\r\n" % len(body)
    call = b"POST /predict%b HTTP/1.1\r\nhost: h\r\n" % query + headers + length + body
    without = await asked(call, [], Interface())
    assert await asked(call, ["tei"], Interface()) == without


@pytest.mark.parametrize("name", ["json", "untyped json", "a list", "picture", "another object"])
async def test_a_model_that_reads_whole_documents_gets_them(name: str) -> None:
    query, headers, body = CALLS[name]
    for document in (body, b'{"inputs": "a"}'):
        length = b"content-length: %d\r\n\r\n" % len(document)
        call = b"POST /predict%b HTTP/1.1\r\nhost: h\r\n" % query + headers + length + document
        without = await asked(call, [], Interface(envelope=False))
        assert await asked(call, ["tei"], Interface(envelope=False)) == without


async def test_calls_of_both_kinds_may_share_a_connection_and_a_head() -> None:
    facts = TextFacts(task="classification", max_tokens=9, vocab_size=9)
    model = FakeModel(interface=Interface(text=facts, labels=("a", "b")))
    labels = json.dumps([2, [{"label": "b", "index": 1, "score": 0.5}]]).encode()
    model._reply = lambda index: result(
        labels if b"count" in model.refs[index].parameters else b"7"
    )
    head = b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    ours, theirs = b'{"instances":[1]}', b'{"inputs":"abcd"}'
    assert len(ours) == len(theirs)
    head += b"content-length: %d\r\n\r\n" % len(ours)
    async with serve(model) as server:
        server.protocol.predict.optional = [CALLS_BY_SETTING["tei"]]
        async with server.connect() as client:
            answers = [(await client.ask(head + body)).json for body in (ours, theirs) * 3]
        assert len(server.protocol.known_heads) == 1
    assert answers == [{"predictions": [7]}, [{"score": 0.5, "label": "b"}]] * 3


async def test_an_error_of_a_head_is_ours_and_an_error_of_inputs_is_theirs() -> None:
    model = FakeModel()
    async with serve(model) as server:
        server.protocol.predict.optional = [CALLS_BY_SETTING["tei"]]
        head = b"POST /predict HTTP/1.1\r\nhost: h\r\ncontent-length: 14\r\n"
        refused = await server.answer_to(head + b'x-priority: 0\r\n\r\n{"inputs":"a"}')
        assert refused.headers["content-type"] == "application/problem+json"
        refused = await server.answer_to(head + b'\r\n{"inputs":"a"}')
        assert (refused.status, refused.json["error_type"]) == (424, "Backend")
    assert not model.payloads
