"""Handlers of archives, as a worker runs them."""

import json
from pathlib import Path

import pytest

from inferpool.models.content import Content
from inferpool.models.errors import BadReturnError, InputError, SourceError
from inferpool.models.item import Item
from inferpool.models.torchserve.answers import MEDIA_TYPE
from inferpool.models.torchserve.model import model_of_archive
from tests.models.items import answers, bytes_item, json_item, loaded
from tests.models.torchserve.archives import make_folder, make_mar

ECHO = """
import json, os
from ts.context import Context

class Echo:
    def __init__(self):
        self.context = None

    def initialize(self, context):
        self.names = sorted(os.listdir(context.system_properties["model_dir"]))
        self.before = context.model_name

    def handle(self, data, context):
        return [
            {name: repr(value) for name, value in row.items()} | {"batch": len(data)}
            for row in data
        ]
"""


def archived(folder: Path, code: str, **fields: object) -> Path:
    make_folder(folder, **fields)
    (folder / "handler.py").write_text(code)
    return folder


def model_of(folder: Path, code: str, **fields: object):
    return loaded(model_of_archive(archived(folder, code, **fields)))


def enveloped(payload: bytes, *parts, **headers: str) -> Item:
    parameters = {
        "parts": parts or [["body", 0, len(payload), "bytes", ""]],
        "headers": headers,
        "envelope": True,
    }
    return Item(kind="bytes", payload=memoryview(payload), parameters=parameters)


def opened(content: object) -> tuple[dict[str, object], bytes]:
    assert isinstance(content, Content)
    assert content.media_type == MEDIA_TYPE
    assert content.fault == ""
    end = 4 + int.from_bytes(content.data[:4], "little")
    return json.loads(content.data[4:end]), bytes(content.data[end:])


def test_a_class_gets_all_requests_of_a_batch_in_one_call(tmp_path):
    model = model_of(tmp_path / "echo", ECHO)

    found = answers(model, [bytes_item(b"one"), json_item({"x": [1, 2.5]})])

    assert found == [
        {"body": "bytearray(b'one')", "batch": 2},
        {"body": "{'x': [1, 2.5]}", "batch": 2},
    ]
    assert (model.archive.name, model.archive.version) == ("toy", "1.0")


def test_a_mar_answers_as_its_folder_does(tmp_path):
    path = make_mar(tmp_path / "toy.mar")

    model = loaded(model_of_archive(path, name="other"))

    assert answers(model, [bytes_item(b"")]) == ["ok"]
    assert model.archive.name == "other"


def test_a_protocol_gets_the_bytes_that_torchserve_would_send(tmp_path):
    code = """
def handle(data, context):
    if data is None:
        return
    kind = data[0]["kind"].decode()
    context.set_response_status(201, "Made", 0)
    context.set_response_content_type(0, "image/png" if kind == "bytes" else "")
    context.set_response_header(0, "X-Kind", kind)
    return [{"bytes": b"\\x89PNG", "text": "h\\u00e9", "json": {"a": [1, float("nan")]}}[kind]]
"""
    model = model_of(tmp_path / "kinds", code)

    def asked(kind: bytes):
        (content,) = answers(model, [enveloped(kind, ["kind", 0, len(kind), "bytes", ""])])
        return opened(content)

    head, body = asked(b"bytes")
    assert body == b"\x89PNG"
    assert head == {
        "status": 201,
        "reason": "Made",
        "headers": [["X-Kind", "bytes"]],
        "content_type": "image/png",
    }
    assert asked(b"text")[1] == "h\u00e9".encode()
    assert asked(b"json")[1] == b'{\n  "a": [\n    1,\n    NaN\n  ]\n}'
    assert asked(b"json")[0]["content_type"] is None


def test_parts_are_handed_over_as_torchserve_does(tmp_path):
    model = model_of(tmp_path / "echo", ECHO)
    payload = b'{"a": 1}' + b"\xff\x00" + "h\u00e9".encode() + b"{bad"
    item = enveloped(
        payload,
        ["j", 0, 8, "json", ""],
        ["b", 8, 10, "bytes", ""],
        ["t", 10, 13, "text", ""],
        ["x", 13, 17, "json", ""],
    )

    (content,) = answers(model, [item])

    assert json.loads(opened(content)[1]) == {
        "j": "{'a': 1}",
        "b": "bytearray(b'\\xff\\x00')",
        "t": "'h\u00e9'",
        "x": "bytearray(b'{bad')",
        "batch": 1,
    }


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"parts": [["a", 0, 9, "bytes", ""]]}, "must lie between 0 and 3"),
        (
            {"parts": [["a", 0, 3, "bytes", ""], ["b", 0, 3, "bytes", ""]]},
            "must lie between 3 and 3",
        ),
        ({"parts": [["a", 0, 3, "pickle", ""]]}, "Invalid enum value 'pickle'"),
        ({"headers": {"x": "y" * 20_000}}, "more than 16,384 characters"),
        ({"top": 5}, "unknown field `top`"),
    ],
)
def test_parameters_that_fit_no_payload_are_the_clients_fault(tmp_path, parameters, said):
    model = model_of_archive(make_folder(tmp_path / "toy"))

    with pytest.raises(InputError, match=said):
        model.preprocess(Item(kind="bytes", payload=memoryview(b"abc"), parameters=parameters))


def test_a_prediction_exception_chooses_the_status(tmp_path):
    code = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data:
        raise PredictionException("no such fruit", 404)
"""
    model = model_of(tmp_path / "fruit", code)

    (content,) = answers(model, [enveloped(b"kiwi")])

    head, body = opened(content)
    assert (head["status"], head["error"], body) == (404, "no such fruit", b"")
    with pytest.raises(InputError, match="status 404: no such fruit"):
        answers(model, [bytes_item(b"kiwi")])


def test_a_picture_that_a_handler_cannot_read_is_refused_as_by_torchserve(tmp_path, caplog):
    code = """
from inferpool.models.errors import InputError  # as our built-in handlers raise it

def handle(data, context):
    if data:
        raise InputError("no picture")
"""
    caplog.set_level("INFO")
    model = model_of(tmp_path / "picture", code)

    head, _ = opened(answers(model, [enveloped(b"GIF")])[0])

    assert (head["status"], head["error"]) == (503, "Prediction failed")
    assert "refuses a request: no picture" in caplog.text
    with pytest.raises(InputError, match="no picture"):
        answers(model, [bytes_item(b"GIF")])


def test_the_wrong_number_of_answers_is_an_error_that_says_both(tmp_path):
    model = model_of(tmp_path / "one", "def handle(data, context):\n    return ['only']\n")

    with pytest.raises(BadReturnError, match="returned 1 answers to 2 requests"):
        answers(model, [bytes_item(b""), bytes_item(b"")])


def test_a_header_that_would_break_http_is_left_out(tmp_path, caplog):
    code = """
def handle(data, context):
    if data is None:
        return
    context.set_response_header(0, "X-Evil", "a\\r\\nSet-Cookie: b")
    context.set_response_header(0, "X-Good", "c")
    return [context.get_request_header(0, "ACCEPT")]
"""
    model = model_of(tmp_path / "headers", code)

    head, body = opened(answers(model, [enveloped(b"", accept="text/html")])[0])

    assert head["headers"] == [["X-Good", "c"]]
    assert body == b"text/html"
    assert "'X-Evil'" in caplog.text


def test_a_part_of_torchserve_that_is_missing_is_named(tmp_path):
    code = "from ts.torch_handler.vllm_handler import VLLMHandler\n"

    with pytest.raises(SourceError, match=r"'ts.torch_handler.vllm_handler'.*does not come with"):
        model_of(tmp_path / "vllm", code)


def test_a_package_that_is_missing_is_named_with_how_to_install_it(tmp_path):
    with pytest.raises(SourceError, match="pip install no_such_package"):
        model_of(tmp_path / "missing", "import no_such_package\n")


def test_two_classes_are_refused(tmp_path):
    code = "class One:\n    pass\n\nclass Two:\n    pass\n"

    with pytest.raises(SourceError, match="its classes are One, Two"):
        model_of(tmp_path / "two", code)
