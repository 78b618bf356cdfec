"""Calls as SageMaker makes them, over ASGI, to a model that answers as told."""

import csv
import io
import json
import time
from typing import Any

import httpx
import numpy as np
import pytest

from inferpool.models.spec import Interface
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Predict
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.errors import InvalidInputError, ModelFailedError, OverloadedError
from inferpool.service.parts.platforms.sagemaker import served_name
from inferpool.workers.shared.messages import ContentBlob, TensorBlob
from tests.service.api.fakes import FakeModel, call, kinds_of, result
from tests.service.parts.torchserve.fake_archives import answer as handled
from tests.service.parts.torchserve.fake_archives import archive, parts_of

JSON, CSV, LINES, NPY = (
    "application/json",
    "text/csv",
    "application/jsonlines",
    "application/x-npy",
)


def ask(
    model: FakeModel,
    body: bytes,
    media_type: str | None = JSON,
    *,
    accept: str | None = None,
    path: str = "/invocations",
    headers: dict[str, str] | None = None,
    **limits: Any,
) -> httpx.Response:
    predict = Predict(
        {"fake": model},
        default="fake",
        optional=[CALLS_BY_SETTING["sagemaker"]],
        limits=Limits(**limits),
    )
    given = {"content-type": media_type, "accept": accept or "*/*", **(headers or {})}
    sent = {name: value for name, value in given.items() if value is not None}
    return call(predict, "POST", path, content=body, headers=sent)


def bodies_for(body: bytes, media_type: str | None, **interface: Any) -> list[tuple[str, bytes]]:
    model = FakeModel(interface=Interface(**interface))
    answer = ask(model, body, media_type)
    assert answer.status_code == 200, answer.text
    return kinds_of(model)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    found = answer.json()
    assert found["code"] == answer.status_code
    assert found["message"]
    return answer.status_code, found["type"]


@pytest.mark.parametrize(
    ("body", "payloads", "answer"),
    [
        (b'{"instances":[1,[2]]}', [b"1", b"[2]"], {"predictions": [0, 1]}),
        (b"[[1,2], [3]]", [b"[1,2]", b"[3]"], [0, 1]),
        (b' [{"a":1}]', [b'{"a":1}'], [0]),
        (b'["a","b"]', [b'"a"', b'"b"'], [0, 1]),
        (b"[1,2,3]", [b"[1,2,3]"], 0),
        (b'{"a":1}', [b'{"a":1}'], 0),
        (b'{"b":{"instances":1}}', [b'{"b":{"instances":1}}'], 0),
        (b'"text"', [b'"text"'], 0),
    ],
)
def test_json_is_a_list_of_instances_or_one(body, payloads, answer):
    model = FakeModel()
    assert ask(model, body).json() == answer
    assert kinds_of(model) == [("json", each) for each in payloads]


@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded"])
def test_json_needs_no_type(media_type):
    assert bodies_for(b'{"a":1}', media_type) == [("json", b'{"a":1}')]


def test_a_model_of_documents_gets_the_body_as_it_stands():
    assert bodies_for(b"[[1],[2]]", JSON, envelope=False) == [("document", b"[[1],[2]]")]


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (b"1,2\n3,4\n", [b"[1,2]", b"[3,4]"]),
        (b"1, .5,-2e3\r\n\r\n+7,,x y", [b"[1,0.5,-2000.0]", b'[7,null,"x y"]']),
        (b'"a ""b"", c",2\n"3",4', [b'["a \\"b\\", c",2]', b"[3,4]"]),
        (b'"a\nb"\n5', [b'"a\\nb"', b"[5]"]),
        (b"some text\n", [b'"some text"']),
        (
            b"1,,,2,\n,,\n,-1\n1e9,2",
            [b"[1,null,null,2,null]", b"[null,null,null]", b"[null,-1]", b"[1e9,2]"],
        ),
        (b"01,1e999\n1 2,-\ntrue,[1]", [b'[1,"1e999"]', b'["1 2","-"]', b'["true","[1]"]']),
        (b"nan,1_0,inf", [b'["nan","1_0","inf"]']),
        (b"+" + b"1" * 401, [b'"+' + b"1" * 401 + b'"']),
        ("é,1".encode(), ['["é",1]'.encode()]),
    ],
)
def test_each_row_of_csv_is_an_instance(body, rows):
    assert bodies_for(body, CSV) == [("json", each) for each in rows]


def test_the_first_row_names_the_columns_if_the_type_says_so():
    rows = bodies_for(b"a,b\n1,x\n2,y\n", "text/csv; charset=utf-8; header=present")
    assert rows == [("json", b'{"a":1,"b":"x"}'), ("json", b'{"a":2,"b":"y"}')]


def test_each_line_is_an_instance_and_is_answered_by_one():
    model = FakeModel()
    answer = ask(model, b'{"a":1}\n\n [2] \r\n"x"', LINES)
    assert (answer.text, answer.headers["content-type"]) == ("0\n1\n2\n", LINES)
    assert kinds_of(model) == [("json", b'{"a":1}'), ("json", b"[2]"), ("json", b'"x"')]
    assert ask(model, b"1\n2", LINES, accept=JSON).json() == [3, 4]


def answering(value: bytes) -> FakeModel:
    return FakeModel(lambda _: result(value))


@pytest.mark.parametrize(
    ("value", "body", "rows"),
    [
        (b"[1,2.5]", b"[[0],[0]]", "1,2.5\n1,2.5\n"),
        (b"[1,2.5]", b"[0]", "1\n2.5\n"),
        (b'{"label":"a, b","scores":{"x":0.5,"y":1}}', b"0", '"a, b",0.5,1\n'),
        (b"7", b"0", "7\n"),
        (b"[[1,2],[3,4]]", b"0", "1,2\n3,4\n"),
    ],
)
def test_answers_become_rows(value, body, rows):
    answer = ask(answering(value), body, accept=CSV)
    assert (answer.text, answer.headers["content-type"]) == (rows, CSV)


@pytest.mark.parametrize(
    "value", [b"[1,2.5e-3]", b"-7", b'["a",1]', b"[]", b"[[1],2]", b'"x"', b'"5"', b"{}"]
)
def test_rows_of_numbers_are_rendered_as_all_others(value):
    rows = list(csv.reader(io.StringIO(ask(answering(value), b"[[0],[0]]", accept=CSV).text)))
    answer = json.loads(value)
    cells = [
        each
        for part in (answer if isinstance(answer, list) else [answer] if answer else [])
        for each in (part if isinstance(part, list) else [part])
    ]
    assert [[str(each) for each in cells]] * 2 == [[_same(each) for each in row] for row in rows]


def _same(cell: str) -> str:
    return str(json.loads(cell)) if cell[:1] in "-0123456789" else cell


def test_answers_with_too_many_values_for_rows_are_not_acceptable():
    value = b"[" + b'"a",' * (1 << 21) + b"1,1]"
    assert error_of(ask(answering(value), b"0", accept=CSV))[0] == 406


def test_an_answer_that_is_no_row_is_not_acceptable():
    answer = ask(answering(b"[" * 9 + b"]" * 9), b"0", accept=CSV)
    assert error_of(answer)[0] == 406


def test_tensors_come_as_npy():
    blob = TensorBlob("y", "float32", (2,), np.float32([1, 2]).tobytes())
    model = FakeModel(lambda _: result([blob]))
    sent = io.BytesIO()
    np.save(sent, np.zeros((3, 4), np.float32))
    answer = ask(model, b"[[1],[2]]", accept=NPY)
    assert np.load(io.BytesIO(answer.content)).tolist() == [[1, 2], [1, 2]]
    assert model.refs[0].wants_tensors


def test_content_of_a_model_comes_as_it_is():
    model = FakeModel(
        lambda _: result(ContentBlob("image/png", b"\x89PNG")),
        interface=Interface(media_types=("image/png",)),
    )
    for accept in (None, "image/png", "image/*"):
        answer = ask(model, b"1", accept=accept)
        assert (answer.content, answer.headers["content-type"]) == (b"\x89PNG", "image/png")


@pytest.mark.parametrize(
    ("body", "media_type", "accept", "error"),
    [
        (b"{", JSON, None, (400, "BadRequestException")),
        (b"[[1],[2", JSON, None, (400, "BadRequestException")),
        (b"[[1]],[2]", JSON, None, (400, "BadRequestException")),
        (b"[1]\n[2", LINES, None, (400, "BadRequestException")),
        (b"1,2\n\xff", CSV, None, (400, "BadRequestException")),
        (b'"a\n', CSV, None, (400, "BadRequestException")),
        (b"", CSV, None, (400, "BadRequestException")),
        (b"\n", LINES, None, (400, "BadRequestException")),
        (b"a,b\n1", "text/csv;header=present", None, (400, "BadRequestException")),
        (b"a,b", "text/csv;header=present", None, (400, "BadRequestException")),
        (b"1", "text/foo", None, (415, "UnsupportedMediaTypeException")),
        (b"1", JSON, "text/html", (406, "BadRequestException")),
        (b"1\n" * 9, CSV, None, (413, "BadRequestException")),
        (b'"1"\n' * 9, CSV, None, (413, "BadRequestException")),
        (b"1\n" * 9, LINES, None, (413, "BadRequestException")),
        (b"[[1]" + b",[1]" * 8 + b"]", JSON, None, (413, "BadRequestException")),
        (b"1," * 400, CSV, None, (413, "BadRequestException")),
        (b"[" * 400 + b"]" * 400, JSON, None, (413, "BadRequestException")),
        (b"[" * 300, JSON, None, (400, "BadRequestException")),
    ],
)
def test_bad_bodies_are_refused_in_the_form_of_multi_model_server(body, media_type, accept, error):
    model = FakeModel()
    answer = ask(model, body, media_type, accept=accept, max_instances=8, max_json_bytes=700)
    assert error_of(answer) == error
    assert not model.payloads


@pytest.mark.parametrize(
    ("body", "media_type", "said"),
    [
        (b"+a," * (1 << 15) + b"a\n" + b"+a," * (1 << 15) + b"a", CSV, "65536 values"),
        (b'"a",' * (1 << 16), CSV, "65536 values"),
        (b"1e5," * (1 << 20) + b"1e5,", CSV, "65536 values"),
        (b"," * (1 << 22), CSV, "65536 values"),
        (b"x" * (1 << 21) + b"\nx" + b"x" * (1 << 21), CSV, "4194304 bytes"),
        (b'"' + b"x" * (1 << 22) + b'"', CSV, "4194304 bytes"),
        (b"1" + b"\n" * 270_000 + b"1", CSV, "270000 lines"),
        (b'"1"' + b"\r" * 270_000 + b"1", CSV, "270000 lines"),
        (b"1" + b"\n" * 270_000 + b"1", LINES, "270000 lines"),
    ],
)
def test_what_is_slow_to_read_is_bounded(body, media_type, said):
    answer = ask(FakeModel(), body, media_type, max_json_bytes=1 << 24, max_body_bytes=1 << 24)
    assert error_of(answer)[0] == 413
    assert said in answer.json()["message"]


def test_a_row_of_two_million_numbers_is_read_without_reading_each():
    row = b"1," * 2_000_000 + b"1"
    began = time.thread_time()
    assert bodies_for(row, CSV) == [("json", b"[%b]" % row)]
    took_s = time.thread_time() - began
    began = time.thread_time()
    json.loads(b"[%b]" % row)
    assert took_s < time.thread_time() - began


def test_one_instance_that_fails_fails_the_call_with_its_place():
    replies = [result(b"1"), InvalidInputError("instance: too long")]
    answer = ask(FakeModel(lambda index: replies[index]), b"[[1],[2]]")
    assert error_of(answer) == (400, "BadRequestException")
    assert answer.json()["message"] == "instances[1]: too long"
    answer = ask(FakeModel(lambda _: ModelFailedError("it raised KeyError")), b"1")
    assert error_of(answer) == (500, "InternalServerException")
    assert (
        ask(FakeModel(refusals=[OverloadedError("full", retry_after_s=1)]), b"1").status_code == 429
    )


def test_the_model_is_named_by_a_header_or_the_path():
    model = FakeModel()
    target = {"x-amzn-sagemaker-target-model": "/fake.tar.gz"}
    assert ask(model, b"1", headers=target).json() == 0
    assert ask(model, b"1", path="/models/fake/invoke").json() == 1
    for name in ("other", "Über", "../fake"):
        answer = ask(model, b"1", headers={"x-amzn-sagemaker-target-model": name.encode()})
        assert error_of(answer) == (404, "ModelNotFoundException")
    assert "'../fake'" in answer.json()["message"]
    assert ask(model, b"1", path="/models/a/b/invoke").status_code == 404
    assert served_name("fake") == "fake"
    assert served_name("A/b") != served_name("A/c")


@pytest.mark.parametrize(
    ("value", "echoed"), [("trace=1; a", "trace=1; a"), ("é", None), ("x" * 1025, None)]
)
def test_custom_attributes_come_back_with_the_answer(value, echoed):
    name = "x-amzn-sagemaker-custom-attributes"
    answer = ask(FakeModel(), b"1", headers={name: value.encode()})
    assert answer.headers.get(name) == echoed


def test_an_archive_of_torchserves_is_asked_and_answers_by_its_handler():
    body = b"{\n  1\n}"
    model = archive(reply=lambda _: handled(body, status=207, headers=[["x-own", "1"]]))
    answer = ask(model, b'{"a": 1}', headers={"x-amzn-sagemaker-custom-attributes": "id=5"})
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (207, body, "1")
    assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "id=5"
    assert parts_of(model) == [("body", b'{"a": 1}', "json", JSON)]
    failing = archive(reply=lambda _: ModelFailedError("it raised KeyError"))
    assert error_of(ask(failing, b"1"))[0] >= 500


def test_calls_with_one_head_may_have_bodies_of_several_forms():
    model = FakeModel()
    assert ask(model, b"[[1],[2]]").json() == [0, 1]
    assert ask(model, b"5").json() == 2
    assert json.loads(ask(model, b'{"instances":[1]}').content) == {"predictions": [3]}
