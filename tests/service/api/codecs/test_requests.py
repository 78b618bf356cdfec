import json
import re

import numpy as np
import pytest
import safetensors.numpy

from inferpool.service.api.codecs.requests import decode
from inferpool.service.api.errors import problem
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    TooLargeError,
    UnsupportedTypeError,
)
from tests.service.api.codecs.test_tensors import npy
from tests.service.api.fakes import head, kinds


@pytest.mark.parametrize("content_type", [b"image/jpeg", b"IMAGE/PNG", b"image/webp; q=1"])
def test_an_image_is_passed_on_as_the_pieces_that_came(content_type: bytes) -> None:
    chunks = [b"ab", b"cd"]
    decoded = decode(content_type, chunks, head(b"top_k=3"))
    (payload,) = decoded.payloads
    assert payload.kind == "image"
    assert payload.chunks is chunks
    assert json.loads(decoded.parameters) == {"top_k": 3}
    assert not decoded.is_batch
    with pytest.raises(InvalidInputError, match="the body is empty"):
        decode(content_type, [b""], head())


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        (b"application/json; charset=utf-8", b'{"instances":[1]}', "json"),
        (b"Application/JSON", b'{"instances":[1]}', "json"),
        (b"application/octet-stream", b"x", "bytes"),
        (b"binary/octet-stream", b"x", "bytes"),
        (b"text/plain", b"x", "json"),
        (b"application/npy", npy(np.zeros(1)), "tensors"),
        (b"application/x-npy", npy(np.zeros(1)), "tensors"),
        (b"application/x-www-form-urlencoded", b' {"instances": [1]}', "json"),
    ],
)
def test_the_content_type_chooses_the_codec(content_type: bytes, body: bytes, kind: str) -> None:
    for chunks in ([b"", body], [body[:1], body[1:]]):
        assert decode(content_type, chunks, head()).payloads[0].kind == kind


@pytest.mark.parametrize(
    ("content_type", "message"),
    [
        (b"", "Content-Type is missing; use one of image/*, multipart/form-data"),
        (b"text/html", "'text/html' is not supported; use one of image/*"),
        (b"application/x-www-form-urlencoded", "-H 'Content-Type: image/jpeg'"),
        (b"\xff\xfe", "is not supported"),
        (b"text/plain; charset=latin-1", "charset 'latin-1' is not supported"),
    ],
)
def test_an_unknown_content_type_lists_the_known(content_type: bytes, message: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=re.escape(message)):
        decode(content_type, [b"x"], head())


def test_a_text_is_one_instance_as_a_string_in_json_would_be() -> None:
    text = 'A "cat"\n\u00fc'
    decoded = decode(b"text/plain; charset=UTF-8", [text.encode()], head(b"top_k=3"))
    assert [(kind, json.loads(body)) for kind, body in kinds(decoded)] == [("json", text)]
    assert not decoded.is_batch
    assert json.loads(decoded.parameters) == {"top_k": 3}
    for body, error in (
        (b"", InvalidInputError), (b"\xff", BadRequestError), (b"x" * 11, TooLargeError)
    ):  # fmt: skip
        with pytest.raises(error):
            decode(b"text/plain", [body], head(max_json_bytes=10))


def test_a_compressed_body_is_refused() -> None:
    assert decode(b"image/png", [b"x"], head(headers={b"content-encoding": b"Identity"}))
    with pytest.raises(UnsupportedTypeError, match="Content-Encoding: gzip") as raised:
        decode(b"image/png", [b"x"], head(headers={b"content-encoding": b"gzip"}))
    status, headers, _ = problem(raised.value, "id", "/predict")
    assert status == 415
    assert (b"accept-encoding", b"identity") in headers


GUESSED = {
    "JPEG": (b"\xff\xd8\xff\xe0rest", "image"),
    "WebP": (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
    "JSON": (b' \n{"instances": [1]}', "json"),
    "JSON with a mark": (b'\xef\xbb\xbf{"instances": [1]}', "json"),
    "npy": (npy(np.zeros(3, np.float32)), "tensors"),
    "safetensors": (safetensors.numpy.save({"x": np.zeros(3, np.float32)}), "tensors"),
}


@pytest.mark.parametrize("name", GUESSED)
def test_a_body_without_a_type_is_what_its_first_bytes_say(name: str) -> None:
    body, kind = GUESSED[name]
    for pieces in ([body], [body[i : i + 1] for i in range(len(body))]):
        decoded = decode(b"", pieces, head())
        assert [each.kind for each in decoded.payloads] == [kind]
        assert not decoded.is_whole
    with pytest.raises(UnsupportedTypeError, match="Content-Type is missing"):
        decode(b"", [body], head(), may_guess=False)


def test_a_body_without_a_type_is_a_tensor_if_a_header_says_so() -> None:
    tensor = {b"x-tensor-dtype": b"uint8", b"x-tensor-shape": b"5"}
    decoded = decode(b"", [b"{abc}"], head(headers=tensor))
    assert decoded.payloads[0].headers[0].shape == (5,)


def test_a_limit_is_named_with_its_setting() -> None:
    for content_type in (b"application/json", b"text/plain"):
        with pytest.raises(TooLargeError, match=r"\(the setting max_json_bytes\); send "):
            decode(content_type, [b" " * (5 << 20)], head())
