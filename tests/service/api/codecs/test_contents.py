"""Answers with content: which form a call gets, and its headers."""

import base64
import json

import pytest

from inferpool.models.spec import Interface
from inferpool.service.api.codecs.answers import choose_format
from inferpool.service.api.codecs.contents import check_several, encode_with_content
from inferpool.service.errors import InvalidInputError, NotAcceptableError, ServiceError
from inferpool.service.queue.instance import Result
from inferpool.workers.shared.messages import ContentBlob
from tests.service.api.fakes import result

PNG = ContentBlob("image/png", b"\x89PNG", {"X-Mood": "fine"})
DRAWS = Interface(media_types=("image/png",))


def encoded(
    *outcomes: Result | ServiceError,
    accept: bytes | None = None,
    is_batch: bool = False,
    envelope: bool = True,
    is_exposed: bool = False,
) -> tuple[int, dict[bytes, bytes], bytes]:
    status, headers, body = encode_with_content(
        outcomes,
        accept=accept,
        is_batch=is_batch,
        envelope=envelope,
        is_exposed=is_exposed,
        request_id="id",
        path="/predict",
    )
    return status, dict(headers), body


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "json"),  # which is also given content
        (b"*/*", "json"),
        (b"image/png", "content"),
        (b"image/*", "content"),
        (b"application/json", "json"),
        (b"image/png, application/json", "json"),
        (b"image/png, application/json;q=0.9", "content"),
        (b"image/png;q=0.5, application/safetensors", "safetensors"),
    ],
)
def test_accept_chooses_between_content_json_and_tensors(
    accept: bytes | None, expected: str
) -> None:
    assert choose_format(accept, DRAWS) == expected


@pytest.mark.parametrize("accept", [b"image/webp", b"text/html", b"image/png;q=0"])
def test_what_the_model_does_not_have_is_refused_before_it_is_computed(accept: bytes) -> None:
    with pytest.raises(NotAcceptableError, match="allows none of image/png, application/json"):
        choose_format(accept, DRAWS)
    assert choose_format(b"image/webp", Interface(media_types=None)) == "content"  # unknown yet


def test_several_instances_need_json() -> None:
    check_several(b"image/png, application/json;q=0.1")
    with pytest.raises(NotAcceptableError, match="one instance a call"):
        check_several(b"image/png")


def test_one_instance_is_answered_with_the_bytes_and_their_headers() -> None:
    status, headers, body = encoded(result(PNG), is_exposed=True)
    assert (status, body) == (200, b"\x89PNG")
    assert headers == {
        b"content-type": b"image/png",
        b"content-length": b"4",
        b"x-mood": b"fine",
        b"access-control-expose-headers": b"x-mood",
    }


def test_json_has_base64_and_no_headers() -> None:
    shown = {"b64": base64.b64encode(PNG.buffer).decode(), "media_type": "image/png"}
    for accept in (b"application/json", b"application/json, image/png"):
        status, headers, body = encoded(result(PNG), accept=accept)
        assert (status, json.loads(body)) == (200, {"predictions": [shown]})
        assert b"x-mood" not in headers
    _, _, body = encoded(result(PNG), accept=b"application/json", envelope=False)
    assert json.loads(body) == shown
    failed = InvalidInputError("no")
    _, _, body = encoded(result(PNG), failed, result(b"7"), is_batch=True)
    one, two, three = json.loads(body)["predictions"]
    assert (one, two["error"]["code"], three) == (shown, "invalid_input", 7)


def test_an_answer_in_another_form_than_the_call_accepts_is_not_acceptable() -> None:
    status, _, body = encoded(result(PNG), accept=b"text/html")
    assert (status, json.loads(body)["code"]) == (406, "not_acceptable")
    assert "image/png, application/json" in json.loads(body)["detail"]
    assert encoded(result(b"7"), accept=b"image/png")[0] == 406


@pytest.mark.parametrize(
    ("media_type", "is_sandboxed"),
    [
        ("image/png", False),
        ("audio/wav", False),
        ("video/mp4", False),
        ("application/pdf", False),
        ("image/svg+xml", True),
        ("text/html; charset=utf-8", True),
        ("application/xhtml+xml", True),
        ("multipart/related", True),
        ("image/unheard-of", True),
    ],
)
def test_what_may_hold_a_script_is_sandboxed(media_type: str, is_sandboxed: bool) -> None:
    _, headers, _ = encoded(result(ContentBlob(media_type, b"", {})))
    assert (headers.get(b"content-security-policy") == b"sandbox") is is_sandboxed
