"""Bodies of models that clients speak to in another way than by instances in a list."""

import base64
import json

import httpx
import pytest

from inferpool.models.item import Item
from inferpool.models.spec import Interface
from inferpool.models.upload import Upload
from inferpool.service.api.codecs.body import BodyContext, Decoded
from inferpool.service.api.codecs.requests import decode
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)
from inferpool.workers.inside.preparing import item_of
from inferpool.workers.shared.messages import ItemRef
from tests.service.api.codecs.test_json import JPEG
from tests.service.api.fakes import body_of, head, kinds

FORM = Interface(form="instance")
BARE = Interface(envelope=False)
FORM_TYPE = "multipart/form-data; boundary=b"


def form(*parts: tuple[str, str], asked: BodyContext | None = None) -> Decoded:
    """Decode a form as curl writes it: the rest of each part's head, and its content."""
    pieces = [
        f'--b\r\nContent-Disposition: form-data; name="{name}\r\n\r\n{content}\r\n'
        for name, content in parts
    ]
    body = "".join(pieces).encode() + b"--b--\r\n"
    return decode(FORM_TYPE.encode(), [body], asked or head(interface=FORM))


def item_in(decoded: Decoded) -> Item:
    """Return the only instance as a worker gives it to its model."""
    (payload,) = decoded.payloads
    content = body_of(payload)
    ref = ItemRef(payload.kind, 0, len(content), 0.0, headers=payload.headers)
    return item_of(ref, memoryview(content))


def bare(body: bytes, content_type: bytes = b"application/json", **says: object) -> Decoded:
    asked = head(b"k=2", interface=Interface(envelope=False, **says))  # type: ignore[arg-type]
    return decode(content_type, [body], asked)


def test_a_form_is_one_instance_with_texts_json_and_files_by_name():
    files = [
        ("image", ("cat.jpg", JPEG, "image/jpeg")),
        ("empty", ("none", b"", "application/octet-stream")),
    ]
    data = {"text": "h\u00e9llo", "numbers": " [1, 2.5]", "object": '{"a": null}', "number": "3"}
    made = httpx.Request("POST", "http://host", files=files, data=data)
    asked = head(b"top_k=2", interface=FORM)
    decoded = decode(made.headers["content-type"].encode(), [made.read()], asked)
    assert not decoded.is_batch
    assert decoded.parameters == b'{"top_k":2}'
    assert item_in(decoded).json() == {
        "text": "h\u00e9llo",
        "numbers": [1, 2.5],
        "object": {"a": None},
        "number": "3",
        "image": Upload(data=JPEG, media_type="image/jpeg", filename="cat.jpg"),
        "empty": Upload(data=b"", media_type="application/octet-stream", filename="none"),
    }


def test_the_type_of_a_field_says_whether_it_is_json_a_text_or_a_file():
    decoded = form(
        ('a"\r\nContent-Type: application/json', "3"),
        ('b"\r\nContent-Type: text/plain', "[no json"),
        ('c"\r\nContent-Type: image/png', "png"),
        ('d"; filename="x.json"\r\nContent-Type: application/json', "{}"),
        ('e"', ""),
    )
    assert item_in(decoded).json() == {
        "a": 3,
        "b": "[no json",
        "c": Upload(data=b"png", media_type="image/png"),
        "d": Upload(data=b"{}", media_type="application/json", filename="x.json"),
        "e": "",
    }


def test_fields_of_one_name_are_a_list_in_their_order():
    decoded = form(('x"', "one"), ('y"', "alone"), ('x"; filename="f"', "two"), ('x"', "[3]"))
    assert item_in(decoded).json() == {
        "x": ["one", Upload(data=b"two", filename="f"), [3]],
        "y": "alone",
    }


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([], InvalidInputError, "as a whole it is one instance: send each value as -F NAME=VALUE"),
        ([('x"', "[1")], BadRequestError, r"field 'x': .* add ;type=text/plain"),
        ([('x"\r\nContent-Type: application/json', "y")], BadRequestError, "field 'x': .* JSON"),
        ([('x"', "[" * 101 + "]" * 101)], InvalidInputError, "field 'x': nested more than 100"),
        ([('x"', "a" * 101)], TooLargeError, "max_json_bytes.*as files"),
        ([('x"', "1")] * 257, TooLargeError, "the form"),
    ],
)
def test_a_form_that_does_not_fit_is_refused_with_the_way_to_send_it(
    parts: list[tuple[str, str]], error: type[ServiceError], text: str
):
    with pytest.raises(error, match=text):
        form(*parts, asked=head(interface=FORM, max_json_bytes=100 if len(parts) == 1 else 10**6))


def test_json_in_the_place_of_a_form_is_read_as_the_form_would_be():
    body = b'{"instances": [{"text": "x", "image": {"b64": "AAAA"}}]}'
    item = item_in(decode(b"application/json", [body], head(interface=FORM)))
    assert item.json() == {"text": "x", "image": Upload(data=b"\0\0\0")}
    alone = b'{"instances": [{"b64": "AAAA"}]}'
    assert kinds(decode(b"application/json", [alone], head(interface=FORM)))[0][0] == "bytes"


def test_a_text_that_is_no_text_is_to_be_sent_as_a_file():
    body = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\xff\r\n--b--\r\n'
    with pytest.raises(BadRequestError, match=r"field 'x': byte 0 is not UTF-8.*-F NAME=@FILE"):
        decode(FORM_TYPE.encode(), [body], head(interface=FORM))


@pytest.mark.parametrize("value", [{"b64": "AAAA"}, {"a": [{"b64": "!"}]}, "text", 3.5, None, [1]])
def test_any_json_document_is_one_instance_as_it_stands(value: object):
    text = json.dumps(value).encode()
    decoded = bare(b" " + text + b"\n")
    assert (kinds(decoded), decoded.is_batch) == ([("document", text)], False)
    assert decoded.parameters == b'{"k":2}'
    item = item_in(decoded)
    assert (item.kind, item.json()) == ("json", value)


@pytest.mark.parametrize("content_type", [b"", b"application/x-www-form-urlencoded"])
def test_json_of_any_kind_needs_no_content_type_where_it_stands_for_itself(content_type: bytes):
    for text in (b'"a"', b"[1]", b" {}", b"-1", b"true"):
        assert kinds(bare(text, content_type)) == [("document", text.strip())]
        if text.strip()[:1] != b"{":
            with pytest.raises(UnsupportedTypeError):
                decode(content_type, [text], head())
    with pytest.raises(UnsupportedTypeError, match=r"-F NAME=VALUE|is missing"):
        bare(b"x=1", content_type)


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (b"", BadRequestError, "empty"),
        (b'{"x": ', BadRequestError, "the body: malformed JSON"),
        (b'"\xff"', BadRequestError, "the body"),
        (b"[" * 101 + b"]" * 101, InvalidInputError, "nested more than 100"),
    ],
)
def test_a_body_that_is_no_document_is_refused(body: bytes, error: type[ServiceError], text: str):
    with pytest.raises(error, match=text):
        bare(body)


def test_a_string_in_the_place_of_an_instance_is_base64_if_the_model_says_so():
    text = json.dumps(base64.b64encode(JPEG).decode()).encode()
    assert kinds(bare(text, accepts="image")) == [("image", JPEG)]
    assert kinds(bare(text, accepts="bytes")) == [("bytes", JPEG)]
    inside = b"[" + text + b"]"
    assert kinds(bare(inside, accepts="image")) == [("document", inside)]
    listed = b'{"instances": [%b, {"b64": %b}, [%b]]}' % (text, text, text)
    decoded = decode(b"application/json", [listed], head(interface=Interface(accepts="image")))
    assert kinds(decoded) == [("image", JPEG), ("image", JPEG), ("json", b"[" + text + b"]")]
    assert kinds(decode(b"application/json", [listed], head()))[0] == ("json", text)
    assert kinds(bare(b"hello", b"text/plain", accepts="image")) == [("json", b'"hello"')]


def test_a_string_that_is_no_base64_is_refused_at_its_place():
    pictures = Interface(accepts="image")
    with pytest.raises(InvalidInputError, match=r"^instances\[1\]: a string must be an enc"):
        decode(b"application/json", [b'{"instances": [1, "no!"]}'], head(interface=pictures))
    with pytest.raises(InvalidInputError, match=r"^instance: a string must be bytes in base64"):
        bare(b'"data:image/png;base64,AAAA"', accepts="bytes")


def test_a_form_of_several_files_is_a_batch_also_without_an_envelope():
    files = [("x", ("a", JPEG, "image/jpeg"))]
    for num, is_batch in ((1, False), (2, True)):
        made = httpx.Request("POST", "http://host", files=files * num)
        content_type = made.headers["content-type"].encode()
        assert decode(content_type, [made.read()], head(interface=BARE)).is_batch == is_batch
        assert decode(content_type, [made.read()], head()).is_batch
