import base64
import json
import re

import pytest

from inferpool.service.api.codecs.json import decode_instance, decode_json, is_image
from inferpool.service.errors import BadRequestError, InvalidInputError, ServiceError, TooLargeError
from tests.service.api.fakes import body_of, head, kinds

JPEG = b"\xff\xd8\xff\xe0rest"


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def body(*instances: object, **more: object) -> list[bytes]:
    return [json.dumps({"instances": instances, **more}).encode()]


def test_base64_is_decoded_and_images_are_known_by_their_first_bytes() -> None:
    decoded = decode_json(body({"b64": b64(JPEG)}, {"b64": b64(b"other")}, {"b64": ""}), head())
    assert kinds(decoded) == [("image", JPEG), ("bytes", b"other"), ("bytes", b"")]
    assert decoded.is_batch


def test_other_instances_go_on_as_the_text_they_are() -> None:
    text = b'{"instances": [ [1.50, 2e3] , {"x": "\\u00e4"}, "s", null, {"b64": "YQ==", "y": 1}]}'
    assert kinds(decode_json([text[:9], text[9:]], head())) == [
        ("json", b"[1.50, 2e3]"),
        ("json", b'{"x": "\\u00e4"}'),
        ("json", b'"s"'),
        ("json", b"null"),
        ("json", b'{"b64": "YQ==", "y": 1}'),
    ]


def test_parameters_come_from_the_body_and_the_query() -> None:
    decoded = decode_json(body(1, parameters={"top_k": 3}), head(b"labels=false"))
    assert json.loads(decoded.parameters) == {"labels": False, "top_k": 3}
    assert decode_json(body(1), head()).parameters == b""
    assert decode_json(body(1, parameters=None), head()).parameters == b""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the body is empty, and JSON is expected"),
        (b"{", "the body: "),
        (b'{"instances":[1,]}', "malformed JSON: trailing comma"),
        (b'{"instances":[NaN]}', "malformed JSON"),
        (b'{"instances":["\xff"]}', "the body: not UTF-8"),
        (b'{"instances":[1]} x', "malformed JSON"),
        (
            b'{"instances":["a\\ud800"]}',
            "the body: malformed JSON: half of a surrogate pair (byte 16)",
        ),
        (
            b'{"instances":["\\ud83d\\ude00 \\\\ud800 \\udc00 x"]}',
            "half of a surrogate pair (byte 36)",
        ),
        (
            b'{"instances":["\\\\ud83d\\ude00 \\n"]}',  # the first half is no escape
            "half of a surrogate pair (byte 22)",
        ),
        (b'{"instances":[{"\\ud800":1}]}', "half of a surrogate pair (byte 16)"),
        (b'{"instances":["a', "the body: malformed JSON: it ends too early, after 16 bytes"),
        (
            b'{"instances":[1],"parameters":{"a":[0,-1e999]}}',
            "parameters: -1e999 at a[1] is out of range",
        ),
        (
            b'{"instances":[1],"parameters":{"a":{"b":1%s}}}' % (b"0" * 4301),
            "parameters: 1%s... (4302 characters) at a.b is out of range" % ("0" * 29),
        ),
        (
            b'{"instances":[1],"parameters":{"%s":1e999}}' % (b"k" * 9000),
            "parameters: 1e999 at %s... is out of range" % ("k" * 200),
        ),
        (b'{"instances":[{"b64":"\\q"}]}', "malformed JSON"),
    ],
)
def test_a_body_that_is_not_json_is_a_bad_request(text: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(message)):
        decode_json([text], head())


def test_a_byte_order_mark_is_ignored() -> None:
    decoded = decode_json([b"\xef\xbb", b'\xbf{"instances":[1]}'], head())
    assert kinds(decoded) == [("json", b"1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `instances`"),
        (b'{"instances": 5}', "Expected `array`, got `int` - at `instances`"),
        (b'{"instances": []}', "instances: is empty"),
        (b'{"instances": [1], "inputs": 2}', "unknown field `inputs`"),
        (b'{"instances": [1], "parameters": [2]}', "parameters: must be an object"),
        (b'{"instances": [1, {"b64": 7}]}', "instances[1].b64: not base64"),
        (b'{"instances": [{"b64": "YQ"}]}', "instances[0].b64: not base64"),
        (b'{"instances": [{"b64": "data:image/png;base64,YQ=="}]}', "no data: prefix"),
        (b'{"instances": [%s1%s]}' % (b"[" * 99, b"]" * 99), "more than 100 deep"),
        (b"[" * 100_000, "more than 100 deep"),
    ],
)
def test_json_of_another_form_is_invalid_and_its_place_is_named(text: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        decode_json([text], head())
    allowed = b'{"instances":[%s1%s]}' % (b"[" * 98, b"]" * 98)
    assert len(decode_json([allowed], head()).payloads) == 1


@pytest.mark.parametrize("num_instances", [5, 100_000])
def test_too_many_instances_are_refused(num_instances: int) -> None:
    with pytest.raises(TooLargeError, match="instances: more than 4"):
        decode_json(
            [b'{"instances":[%s]}' % b",".join([b"1"] * num_instances)], head(max_instances=4)
        )


def test_a_large_body_within_the_limit_is_taken() -> None:
    rows = [[1.5] * 30_000, {"b64": b64(JPEG * 20_000)}]
    decoded = decode_json(body(*rows), head(max_instances=2))
    assert [kind for kind, _ in kinds(decoded)] == ["json", "image"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (JPEG, True),
        (b"\x89PNG\r\n\x1a\nx", True),
        (b"GIF89a", True),
        (b"RIFF1234WEBPVP8 ", True),
        (b"RIFF1234WAVEfmt ", False),
        (b"\0\0\0\x1cftypavif", True),
        (b"\0\0\0\x1cftypisom", False),
        (b"II*\0", True),
        (b"", False),
    ],
)
def test_images_are_told_by_their_magic_bytes(content: bytes, expected: bool) -> None:
    assert is_image(content) is expected


@pytest.mark.parametrize(
    "text",
    [
        b'{"b64": "/9j/"}', b'{"b64": "eA=="}', b'{"b64": "eA==", "a": 1}', b"{}",
        b' [1, "\xc3\xbc"] ', b"null\r", b"", b" ", b"1 2", b"1,2", b"[1", b'"\xff"',
        b"\xef\xbb\xbf1", b"nan", b'{"b64": 1}', b'{"b64": "?"}', b'{"b64": "\\ud800"}',
        b"[" * 98 + b"]" * 98, b"[" * 101,
    ],
)  # fmt: skip
def test_a_lone_instance_is_read_as_in_a_list(text: bytes) -> None:
    try:
        (expected,) = decode_json([b'{"instances":[%s]}' % text], head(max_instances=1)).payloads
    except ServiceError:
        with pytest.raises(ServiceError):
            decode_instance(text)
        return
    found = decode_instance(text)
    assert (found.kind, body_of(found)) == (expected.kind, body_of(expected))
