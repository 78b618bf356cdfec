"""Fake models that are archives, what they are asked, and answers of their handlers."""

import base64
import json
from typing import Any

from inferpool.models.spec import ArchiveFacts, Interface
from inferpool.service.api.exchange import Predict
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.workers.shared.messages import ContentBlob
from tests.service.api.fakes import FakeModel, body_of, result

OPTIONAL = [CALLS_BY_SETTING["torchserve"]]
MEDIA_TYPE = "application/vnd.inferpool.handler-answer"


def frame(body: bytes = b"ok", **head: Any) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(4, "little") + text + body


def answer(body: bytes = b"ok", **head: Any) -> Any:
    return result(ContentBlob(MEDIA_TYPE, frame(body, **head)))


def part(body: bytes, **head: Any) -> bytes:
    """A part of a stream."""
    data = base64.b64encode(frame(body, **head)).decode()
    return json.dumps({"b64": data, "media_type": MEDIA_TYPE}).encode()


def archive(
    name: str = "fake", version: str = "1.0", *, streams: bool = False, **options: Any
) -> FakeModel:
    facts = ArchiveFacts(name=name, version=version, handler="h.py")
    interface = Interface(archive=facts, streams=streams, media_types=())
    options.setdefault("reply", lambda _: answer())
    return FakeModel(name=options.pop("key", name), interface=interface, **options)


def served(*models: FakeModel, **options: Any) -> Predict:
    return Predict({each.name: each for each in models}, optional=OPTIONAL, **options)


def parts_of(model: FakeModel, index: int = -1) -> list[tuple[str, bytes, str, str]]:
    """The parts that a handler gets: name, bytes, kind and type of each."""
    payload = model.payloads[index]
    data, table = body_of(payload), parameters_of(model, index)["parts"]
    assert payload.kind == "bytes"
    return [(name, data[start:end], kind, given) for name, start, end, kind, given in table]


def parameters_of(model: FakeModel, index: int = -1) -> Any:
    return json.loads(model.refs[index].parameters)
