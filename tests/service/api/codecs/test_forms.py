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


def test_a_form_has_few_fields() -> None:
    fields = {f"a{number}": "1" for number in range(64)}
    assert len(json.loads(decode_form(files=[("f", FILE)], data=fields).parameters)) == 64
    with pytest.raises(TooLargeError, match="the form has more than 64 fields"):
        decode_form(files=[("f", FILE)], data={**fields, "b": "1"})
