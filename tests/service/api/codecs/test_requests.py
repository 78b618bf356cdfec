import base64
import json
import re

import httpx
import numpy as np
import pytest

from inferpool.service.api.codecs.body import BodyContext, Decoded
from inferpool.service.api.codecs.requests import decode
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)
from tests.service.api.codecs.test_json import JPEG
from tests.service.api.codecs.test_tensors import npy
from tests.service.api.fakes import body_of, head, kinds, spec

FILE = ("a.jpg", JPEG, "image/jpeg")
TWO = [spec(-1, 2, name="a"), spec(-1, name="b")]


def decode_form(asked: BodyContext | None = None, **request: object) -> Decoded:
    """Decode the form that httpx makes."""
    made = httpx.Request("POST", "http://host", **request)  # type: ignore[arg-type]
    return decode(made.headers["content-type"].encode(), [made.read()], asked or head())


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
        (b"text/plain", b"x", "json"),
        (b"application/npy", npy(np.zeros(1)), "tensors"),
        (b"application/x-npy", npy(np.zeros(1)), "tensors"),
        (b"application/x-www-form-urlencoded", b' {"instances": [1]}', "json"),
    ],
)
def test_the_content_type_chooses_the_codec(content_type: bytes, body: bytes, kind: str) -> None:
    assert decode(content_type, [b"", body], head()).payloads[0].kind == kind


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
    with pytest.raises(UnsupportedTypeError, match="Content-Encoding: gzip"):
        decode(b"image/png", [b"x"], head(headers={b"content-encoding": b"gzip"}))


def test_the_files_of_a_form_are_instances_in_their_order() -> None:
    files = [
        ("file", FILE),
        ("file", ("b.npy", npy(np.ones(2, np.float32)), "application/octet-stream")),
        ("other", ("c", b"opaque", "application/octet-stream")),
        ("image", ("d", JPEG, "application/octet-stream")),
    ]
    decoded = decode_form(files=files)
    kinds_of_files = ["image", "tensors", "bytes", "image"]
    assert [payload.kind for payload in decoded.payloads] == kinds_of_files
    assert decoded.is_batch
    batch = [("file", ("b.npy", npy(np.ones((3, 2), np.float32)), "application/x-npy"))]
    decoded = decode_form(head(inputs=[spec(-1, 2)]), files=batch)
    assert [payload.headers[0].shape for payload in decoded.payloads] == [(2,), (2,), (2,)]
    assert len(decode_form(head(inputs=TWO), files=[("x", FILE), ("y", FILE)]).payloads) == 2


def test_fields_of_a_form_are_parameters() -> None:
    data = {"top_k": "3", "name": "cat", "parameters": '{"x": [1], "top_k": 4}'}
    decoded = decode_form(head(b"labels=false"), files=[("file", FILE)], data=data)
    assert json.loads(decoded.parameters) == {
        "labels": False,
        "top_k": 4,
        "name": "cat",
        "x": [1],
    }


def test_a_form_that_ends_in_a_piece_of_its_own_is_read() -> None:
    text = b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nxy\r\n--b--'
    decoded = decode(b"multipart/form-data; boundary=b", [text[:70], text[70:], b"\r\n"], head())
    assert kinds(decoded) == [("bytes", b"xy")]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ([("f", ("a.jpg", b"", "image/jpeg"))], InvalidInputError, "file 0 ('a.jpg'): is empty"),
        (
            [("f", FILE), ("f", ("a.txt", b"x", "text/plain"))],
            UnsupportedTypeError,
            "file 1 ('a.txt'): 'text/plain' is not supported in a form",
        ),
        (
            [("f", ("a.npy", b"x", "application/x-npy"))],
            BadRequestError,
            "file 0 ('a.npy'): not an npy file",
        ),
        ([("f", FILE)] * 4, TooLargeError, "the form holds more than 3 instances"),
        ([("f", FILE)] * 300, TooLargeError, "the form"),
    ],
)
def test_wrong_file_is_named(files: list[object], error: type[ServiceError], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        decode_form(head(max_instances=3), files=files)


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        (b"multipart/form-data", b"x", "the form: Empty boundary"),
        (b"multipart/form-data; boundary=b", b"--b--", "holds no file"),
        (b"multipart/form-data; boundary=b", b"", "the form: Unexpected end"),
        (b"multipart/form-data; boundary=b", b"--b\r\nX", "the form: Unexpected end"),
        (b"multipart/form-data; boundary=b", b"no boundary", "the form: Boundary not found"),
        (b"multipart/form-data; boundary=b", b"--b\r\nX: y\r\n\r\n", "Missing Content-Disposition"),
    ],
)
def test_a_broken_or_empty_form_is_refused(content_type: bytes, body: bytes, message: str) -> None:
    with pytest.raises((BadRequestError, InvalidInputError), match=message):
        decode(content_type, [body], head())


def test_parts_with_the_names_of_inputs_are_one_instance() -> None:
    files = {"b": ("b.jpg", JPEG, "image/jpeg"), "a": ("a.json", b"[1, 2]", "application/json")}
    decoded = decode_form(head(inputs=TWO), files=files, data={"top_k": "3"})
    (payload,) = decoded.payloads
    assert payload.kind == "json"
    assert json.loads(body_of(payload)) == {
        "a": [1, 2],
        "b": {"b64": base64.b64encode(JPEG).decode()},
    }
    assert json.loads(decoded.parameters) == {"top_k": 3}


def test_a_field_with_the_name_of_an_input_is_a_part_of_the_instance() -> None:
    head_of_field = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    fields = [(b"b", b"what is this?"), (b"a", b"[1, 2]")]
    body = b"".join([head_of_field % field for field in fields]) + b"--x--\r\n"
    decoded = decode(b"multipart/form-data; boundary=x", [body], head(inputs=TWO))
    assert json.loads(body_of(decoded.payloads[0])) == {"a": [1, 2], "b": "what is this?"}


def test_arrays_with_the_names_of_inputs_are_one_instance_of_tensors() -> None:
    files = {
        "a": ("a.npy", npy(np.zeros(2, np.float32))),
        "b": ("b.npy", npy(np.float32(1))),
    }
    (payload,) = decode_form(head(inputs=TWO), files=files).payloads
    assert payload.kind == "tensors"
    assert {header.name: header.shape for header in payload.headers} == {"a": (2,), "b": ()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("a", FILE)], "has 'a' but not 'b'"),
        ([("a", FILE), ("b", FILE), ("a", FILE)], "part 'a': appears more than once"),
        ([("a", FILE), ("b", FILE), ("c", FILE)], "files beside 'a' and 'b'"),
        ([("a", FILE), ("b", ("b.json", b"{", "application/json"))], "part 'b': "),
        ([("a", ("a.npy", b"\x93NUMPY")), ("b", ("b.npy", npy(np.zeros(1))))], "part 'a'"),
    ],
)
def test_parts_that_make_no_instance_are_refused(files: list[object], message: str) -> None:
    with pytest.raises((InvalidInputError, BadRequestError), match=message):
        decode_form(head(inputs=TWO), files=files)


def test_a_limit_is_named_with_its_setting() -> None:
    for content_type in (b"application/json", b"text/plain"):
        with pytest.raises(TooLargeError, match=r"\(the setting max_json_bytes\); send "):
            decode(content_type, [b" " * (5 << 20)], head())
