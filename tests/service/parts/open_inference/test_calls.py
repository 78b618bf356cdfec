"""Infer requests over HTTP: what a model gets of them, and what a client gets back."""

import asyncio
import gzip
import json
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import httpx
import numpy as np
import pytest

from inferpool.models import json_errors
from inferpool.models.spec import Interface, TensorSpec
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Exchange, Predict
from inferpool.service.api.exchange import Reply as Answered
from inferpool.service.api.wire.budgets import UnfinishedRequests
from inferpool.service.errors import InvalidInputError, ModelFailedError, UnavailableError
from inferpool.service.parts.open_inference.encodings import Inflation, inflaters
from inferpool.workers.shared.messages import ContentBlob, TensorBlob
from tests.service.api.fakes import FakeModel, NoWire, Reply, endpoint, post, result, spec

PATH = "/v2/models/fake/infer"
LENGTH = "Inference-Header-Content-Length"
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "INT8": "int8", "UINT16": "uint16", "INT16": "int16",
    "UINT32": "uint32", "INT32": "int32", "UINT64": "uint64", "INT64": "int64",
    "FP32": "float32", "FP64": "float64",
}  # fmt: skip
X = [1.0, 2.0, 3.0, 4.0]


def doubler(*inputs: TensorSpec, **options: Any) -> FakeModel:
    """A model that takes x [-1, 2] and is told to answer y [-1, 2] with the number of the row."""

    def reply(index: int) -> Reply:
        row = np.array([index, index + 0.5], np.float32)
        return result([TensorBlob("y", "float32", (2,), row.tobytes())])

    options.setdefault("outputs", [spec(-1, 2, name="y")])
    return FakeModel(reply, inputs=inputs or [spec(-1, 2)], **options)


def tensor(
    name: str = "x", shape: Sequence[object] = (2, 2), datatype: str = "FP32", **rest: object
) -> dict[str, Any]:
    rest = rest or {"data": X}
    return {"name": name, "shape": shape, "datatype": datatype, **rest}


def sized(num_bytes: object, **rest: Any) -> dict[str, Any]:
    return tensor(parameters={"binary_data_size": num_bytes, **rest})


def infer(
    model: FakeModel,
    *inputs: Mapping[str, Any],
    tail: bytes = b"",
    path: str = PATH,
    limits: Limits | None = None,
    headers: Mapping[str, str] | None = None,
    **members: object,
) -> httpx.Response:
    """One call, with tensors behind the JSON if there are any."""
    body = json.dumps({"inputs": inputs, **members}).encode()
    given = {"accept-encoding": "identity"} | ({LENGTH: str(len(body))} if tail else {})
    app = endpoint(model, limits=limits or Limits())
    return post(app, path, content=body + tail, headers=given | dict(headers or {}))


def binary_of(answer: httpx.Response) -> tuple[dict[str, Any], bytes]:
    length = int(answer.headers[LENGTH])
    return json.loads(answer.content[:length]), answer.content[length:]


def error_of(answer: httpx.Response, status: int = 400) -> str:
    found = answer.json()
    assert answer.status_code == status, found
    assert isinstance(found["error"], str)
    assert answer.headers["content-type"] == "application/json"
    assert found["status"] == status
    return str(found["error"])


@pytest.mark.parametrize("data", [X, [[1, 2.0], [3, 4]]], ids=["flat", "nested"])
def test_each_row_of_a_tensor_is_an_instance(data: object) -> None:
    model = doubler()
    answer = infer(model, tensor(data=data), id="seven")
    assert answer.status_code == 200
    assert answer.json() == {
        "model_name": "fake",
        "model_version": "1",
        "id": "seven",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [0.0, 0.5, 1.0, 1.5]}
        ],
    }
    assert [np.frombuffer(body, "<f4").tolist() for body in model.bodies] == [[1, 2], [3, 4]]
    assert all(ref.wants_tensors for ref in model.refs)
    assert [header.name for header in model.refs[0].headers] == ["x"]


def test_all_datatypes_come_and_go_as_json_and_as_binary() -> None:
    for datatype, dtype in DATATYPES.items():
        array = np.array([[0, 1], [1, 0]], dtype)
        if datatype != "BOOL" and dtype[0] in "ui":
            array[0] = np.iinfo(dtype).min, np.iinfo(dtype).max
        rows = [array[i].tobytes() for i in range(2)]

        def reply(index: int, dtype: str = dtype, rows: Sequence[bytes] = rows) -> Reply:
            return result([TensorBlob("y", dtype, (2,), rows[index])])

        size = {"binary_data_size": array.nbytes}
        for given, tail in (
            ({"data": array.tolist()}, b""),
            ({"parameters": size}, array.tobytes()),
        ):
            model = FakeModel(reply, inputs=[spec(-1, 2, dtype=dtype)])
            one = tensor(datatype=datatype, **given)
            answer = infer(model, one, tail=tail)
            (output,) = answer.json()["outputs"]
            assert output["data"] == array.ravel().tolist(), datatype
            assert output["datatype"] == datatype
            assert model.bodies == rows
            model = FakeModel(reply, inputs=[spec(-1, 2, dtype=dtype)])
            head, rest = binary_of(
                infer(model, one, tail=tail, parameters={"binary_data_output": True})
            )
            assert head["outputs"][0] == {
                "name": "y", "datatype": datatype, "shape": [2, 2], "parameters": size,
            }  # fmt: skip
            assert rest == array.tobytes()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_binary_alone(datatype: str) -> None:
    dtype = {"FP16": "float16", "BF16": "bfloat16"}[datatype]

    def reply(index: int) -> Reply:
        return result([TensorBlob("y", dtype, (2,), b"abcd")])

    model = FakeModel(reply, inputs=[spec(-1, 2, dtype=dtype)])
    one = tensor(datatype=datatype, shape=[1, 2], data=[1.0, 2.0])
    assert "binary" in error_of(infer(model, one))
    one = tensor(datatype=datatype, shape=[1, 2], parameters={"binary_data_size": 4})
    assert "binary" in error_of(infer(model, one, tail=b"0123"))
    assert model.bodies == [b"0123"]
    asked = {"name": "y", "parameters": {"binary_data": True}}
    head, rest = binary_of(infer(model, one, tail=b"0123", outputs=[asked]))
    assert head["outputs"][0]["datatype"] == datatype
    assert rest == b"abcd"


def test_an_outputs_wish_wins_over_that_of_the_request() -> None:
    wish = {"name": "y", "parameters": {"binary_data": False}}
    answer = infer(doubler(), tensor(), outputs=[wish], parameters={"binary_data_output": True})
    assert answer.json()["outputs"][0]["data"] == [0.0, 0.5, 1.0, 1.5]
    assert LENGTH not in answer.headers


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (tensor(data=[1, 2, 3]), "4 values, found 3"),
        (tensor(data=[[1, 2], [3]]), "[2, 2] says: in dimension 1"),
        (tensor(data=[[1, 2], [3, 4], []]), "in dimension 0"),
        (tensor(data=[[], [1, 2, 3, 4]]), "in dimension 1"),
        (tensor(data=[[1, "2,"], [3, 4]]), "in dimension 1"),
        (tensor(data=[["1", 2], [3, 4]]), "got `str`"),
        (tensor(shape=[257, 2], data=[]), "a batch of 257"),
        (tensor(data=[[[1], [2]], [[3], [4]]]), "nested 3 deep"),
        (tensor(data=5), "nested 0 deep"),
        (tensor(data=[1, "2", 3, 4]), "`data[1]`"),
        (tensor(data=[1, True, 3, 4]), "`data[1]`"),
        (tensor(data=[1, None, 3, 4]), "`data[1]`"),
        (tensor(data=[1, 2, 3, 1e39]), "value 3 of data"),
        (tensor(data=None), "neither data nor"),
        (tensor(shape=[4]), "the batch"),
        (tensor(shape=[], data=[1]), "the batch"),
        (tensor(shape=[], data=1), "nested 0 deep"),
        (tensor(shape=[4, 1]), "expected shape [-1, 2]"),
        (tensor(shape=[-2, -2]), "-2"),
        (tensor(shape=[1 << 60, 2]), "1099511627776"),
        (tensor(shape=[0, 2], data=[]), "the batch is empty"),
        (tensor(shape=["2", 2]), "shape[0]"),
        (tensor(shape=[2.0, 2]), "shape[0]"),
        (tensor(datatype="INT32", data=[1, 2, 3, 4]), "expected FP32, found INT32"),
        (tensor(datatype="FLOAT"), "'FLOAT' is not one of"),
        (tensor(name="z"), "it has 'x'"),
        (tensor(parameters={"shared_memory_region": "r"}), "shared memory"),
        ({"name": "x"}, "missing required field"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_an_input_that_does_not_fit_is_a_400_that_says_where(
    one: dict[str, Any], said: str
) -> None:
    model = doubler()
    assert said in error_of(infer(model, one), 413 if "a batch of" in said else 400)
    assert model.bodies == []


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT8", 128),
        ("UINT8", -1),
        ("INT64", 1 << 63),
        ("UINT64", 1 << 64),
        ("INT32", 1.0),
        ("FP32", 10**39),
        ("FP64", -(10**309)),
        ("FP64", 10**4000),
        ("FP64", True),
    ],
)
def test_numbers_outside_of_their_datatype_are_refused(datatype: str, value: object) -> None:
    model = FakeModel(inputs=[spec(-1, 1, dtype=DATATYPES[datatype])])
    one = tensor(datatype=datatype, shape=[1, 1], data=[value])
    assert "data" in error_of(infer(model, one))


@pytest.mark.parametrize("num", [2, 100_000])
def test_a_number_that_no_float_holds_is_refused_without_a_search_of_long_data(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    find = json_errors.number_out_of_range

    def count(text: bytes) -> str | None:
        searched.append(len(text))
        return find(text)

    monkeypatch.setattr(json_errors, "number_out_of_range", count)
    one = json.dumps(tensor(shape=[1, num], data=[0] * num))
    body = b'{"inputs": [%b]}' % one.replace("0]}", "1e999]}").encode()
    answer = post(endpoint(doubler(spec(-1, num))), PATH, content=body)
    assert "out of range" in error_of(answer)
    assert max(searched) < 1000


def test_inputs_must_be_those_of_the_model() -> None:
    inputs = [spec(-1, 2), spec(-1, 2, name="z")]
    assert "'z' missing" in error_of(infer(doubler(*inputs), tensor()))
    assert "is there twice" in error_of(infer(doubler(*inputs), tensor(), tensor()))
    assert "inputs: has 0" in error_of(infer(doubler()))
    model = doubler(*inputs)
    assert infer(model, tensor("z"), tensor("x", data=[[5, 6], [7, 8]])).status_code == 200
    assert {header.name for header in model.refs[0].headers} == {"x", "z"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"inputs":{}}', b'{"inputs":[5]}', b"{}", b"[" * 5000,
     b'{"inputs":[],"id":7}', b'{"inputs":[],"outputs":{}}', b'{"inputs":[],"parameters":[]}',
     b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[NaN,1]}]}',
     b'{"inputs":[{"name":"\\ud800","shape":[1,2],"datatype":"FP32","data":[0,1]}]}'],
    ids=lambda body: body[:24].decode("latin-1"),
)  # fmt: skip
def test_a_body_of_another_form_is_a_400(body: bytes) -> None:
    error_of(post(endpoint(doubler()), PATH, content=body))


@pytest.mark.parametrize(
    ("length", "size", "num_bytes"),
    [("-1", 16, 16), ("x", 16, 16), ("99999", 16, 16), ("9" * 30, 16, 16), ("1", 16, 16),
     (None, 16, 15), (None, 16, 17), (None, 12, 12), (None, -1, 16), (None, "16", 16),
     (None, True, 16)],
)  # fmt: skip
def test_sizes_of_binary_tensors_are_compared_with_shape_and_body(
    length: str | None, size: object, num_bytes: int
) -> None:
    model = doubler()
    headers = {} if length is None else {LENGTH: length}
    one = tensor(parameters={"binary_data_size": size})
    error_of(infer(model, one, tail=bytes(num_bytes), headers=headers))
    assert model.bodies == []


def test_a_json_that_came_before_is_read_alike_for_each_tensor_and_each_model() -> None:
    model, other = doubler(), doubler(spec(-1, 2, name="z"), name="other")
    predict = Predict({"fake": model, "other": other})
    body = json.dumps(
        {"inputs": [{**sized(8), "shape": [1, 2]}], "parameters": {"priority": 3, "k": 1}}
    )
    headers = {LENGTH: str(len(body))}
    for number in range(3):
        tail = np.array([number, 1], "<f4").tobytes()
        assert post(predict, PATH, content=body.encode() + tail, headers=headers).is_success
        assert model.bodies[-1] == tail
        assert (model.refs[-1].priority, model.refs[-1].parameters) == (3, b'{"k":1}')
        assert model.refs[-1].headers == model.refs[0].headers
    error_of(post(predict, PATH, content=body.encode() + bytes(7), headers=headers))
    path = "/v2/models/other/infer"
    assert "it has 'z'" in error_of(
        post(predict, path, content=body.encode() + bytes(8), headers=headers)
    )


def test_an_input_has_data_or_a_size_not_both() -> None:
    one = tensor(data=X, parameters={"binary_data_size": 16})
    assert "both" in error_of(infer(doubler(), one, tail=bytes(16)))
    assert "follow the JSON" in error_of(infer(doubler(), sized(16)))


def test_a_body_without_json_is_one_instance_of_the_only_input() -> None:
    model = doubler()
    numbers = np.array([1, 2], "<f4").tobytes()
    head, rest = binary_of(post(endpoint(model), PATH, content=numbers, headers={LENGTH: "0"}))
    assert model.bodies == [numbers]
    assert model.refs[0].headers[0].shape == (2,)
    assert head["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    ]
    assert rest == np.array([0, 0.5], "<f4").tobytes()
    model = doubler(spec(-1, -1, 2))
    assert post(endpoint(model), PATH, content=numbers * 3, headers={LENGTH: "0"}).is_success
    assert model.refs[0].headers[0].shape == (3, 2)
    for inputs in ([spec(-1, -1, -1)], [spec(-1, 3)], [spec(-1, 2), spec(-1, 2, name="z")]):
        answer = post(endpoint(doubler(*inputs)), PATH, content=numbers, headers={LENGTH: "0"})
        error_of(answer)


def test_a_known_head_gets_tensors_while_calls_look_for_their_version_anew() -> None:
    async def go() -> FakeModel:
        model = FakeModel(
            lambda _: result([TensorBlob("x", "float32", (2,), bytes(8))]), inputs=[spec(-1, 2)]
        )
        predict, wire = endpoint(model), NoWire()
        headers = [(LENGTH.lower().encode(), b"0")]
        first = Exchange.open(wire, predict, "POST", PATH, b"", headers)
        first.start()
        earlier = copy(first.call)
        earlier.ref = copy(earlier.ref)
        for is_serving in (True, False, True):
            model.is_serving = is_serving  # it is not while a canary gets a share
            Exchange.from_known_head(wire, predict, earlier).take(bytes(8))
        return model

    model = asyncio.run(go())
    assert [ref.wants_tensors for ref in model.refs] == [True, True, True]
    assert len({id(ref.headers) for ref in model.refs}) == 1  # the last two were not read anew


def test_a_text_without_json_is_one_element() -> None:
    model = FakeModel()
    head, rest = binary_of(post(endpoint(model), PATH, content="fünf", headers={LENGTH: "0"}))
    assert model.bodies == ['"fünf"'.encode()]
    assert head["outputs"][0]["shape"] == [1, 1]
    assert rest == b"\x01\0\0\x000"


def elements(*each: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in each)


@pytest.mark.parametrize("shape", [[2, 1], [2]])
def test_each_element_of_bytes_is_an_instance(shape: list[int]) -> None:
    model = FakeModel(lambda index: result(b'"text %d"' % index))
    answer = infer(model, tensor("any", shape, "BYTES", data=["eins", "zwöi"]))
    (output,) = answer.json()["outputs"]
    assert model.bodies == [b'"eins"', '"zwöi"'.encode()]
    assert {ref.kind for ref in model.refs} == {"json"}
    assert output == {
        "name": "output", "datatype": "BYTES", "shape": [2, 1],
        "parameters": {"content_type": "text/plain"}, "data": ["text 0", "text 1"],
    }  # fmt: skip


PNG = b"\x89PNG\r\n\x1a\n\0\0\0"


@pytest.mark.parametrize(
    ("element", "content_type", "accepts", "kind", "got"),
    [
        (b"BMW makes cars", None, "", "json", b'"BMW makes cars"'),
        (PNG, None, "", "image", PNG),
        (b"\xfe\xff\0", None, "", "bytes", b"\xfe\xff\0"),
        (b"\xfe\xff\0", None, "image", "image", b"\xfe\xff\0"),
        (b"text", None, "bytes", "bytes", b"text"),
        (b' {"a": 1} ', "application/json", "", "json", b'{"a": 1}'),
        (b'{"b64": "AAAA"}', "application/json", "", "bytes", b"\0\0\0"),
        (b"text", "application/octet-stream", "", "bytes", b"text"),
        (PNG, "image/png", "", "image", PNG),
        (b'{"a": 1}', "text/plain; charset=utf-8", "", "json", b'"{\\"a\\": 1}"'),
    ],
)
def test_elements_become_what_predict_would_get(
    element: bytes, content_type: str | None, accepts: Any, kind: str, got: bytes
) -> None:
    model = FakeModel(interface=Interface(accepts=accepts))
    rest = {} if content_type is None else {"content_type": content_type}
    tail = elements(element)
    one = tensor("input", [1, 1], "BYTES", parameters={"binary_data_size": len(tail), **rest})
    assert infer(model, one, tail=tail).status_code == 200
    assert [(ref.kind, body) for ref, body in zip(model.refs, model.bodies, strict=True)] == [
        (kind, got)
    ]


@pytest.mark.parametrize(
    ("shape", "tail", "content_type"),
    [
        ([1, 1], elements(b"text")[:-1], "text/plain"),
        ([1, 1], elements(b"text") + b"\0\0\0", "text/plain"),
        ([2, 1], elements(b"text"), "text/plain"),
        ([1, 2], elements(b"text", b"text"), "text/plain"),
        ([0, 1], b"", "text/plain"),
        ([1] * 1000, elements(b"text"), "text/plain"),
        ([1, 1], elements(b"\xff"), "text/plain"),
        ([1, 1], elements(b"{"), "application/json"),
        ([1, 1], elements(b"[" * 200 + b"]" * 200), "application/json"),
        ([1, 1], elements(b"{"), "application/pdf"),
        ([1, 1], elements(b"{"), 7),
    ],
)
def test_elements_that_cannot_be_read_are_refused(
    shape: list[int], tail: bytes, content_type: object
) -> None:
    parameters = {"binary_data_size": len(tail), "content_type": content_type}
    model = FakeModel()
    answer = infer(model, tensor("input", shape, "BYTES", parameters=parameters), tail=tail)
    assert len(error_of(answer)) < 500
    assert model.bodies == []


def test_more_instances_or_json_than_allowed_are_a_413() -> None:
    limits = Limits(max_instances=1)
    error_of(infer(doubler(), tensor(), limits=limits), 413)
    texts = tensor("input", [2, 1], "BYTES", data=["a", "b"])
    error_of(infer(FakeModel(), texts, limits=limits), 413)
    tail = elements(b"", b"")
    one = tensor("input", [2, 1], "BYTES", parameters={"binary_data_size": len(tail)})
    error_of(infer(FakeModel(), one, tail=tail, limits=limits), 413)
    error_of(infer(doubler(), tensor(), limits=Limits(max_json_bytes=50)), 413)
    error_of(infer(doubler(), tensor(), limits=Limits(max_body_bytes=50)), 413)


def test_answers_in_json_or_content_are_elements() -> None:
    blob = ContentBlob("image/png", PNG)
    for value, element, content_type in (
        (b'{"a":1}', b'{"a":1}', "application/json"),
        (blob, PNG, "image/png"),
    ):
        model = FakeModel(
            lambda _, value=value: result(value), interface=Interface(media_types=("image/png",))
        )  # type: ignore[misc]
        one = tensor("input", [1, 1], "BYTES", data=["a"])
        head, rest = binary_of(infer(model, one, parameters={"binary_data_output": True}))
        assert head["outputs"][0]["parameters"]["content_type"] == content_type
        assert rest == elements(element)
    assert "binary" in error_of(infer(model, one))


def test_outputs_that_are_asked_for_come_in_the_models_order() -> None:
    def reply(index: int) -> Reply:
        return result([TensorBlob(name, "uint8", (1,), name.encode()) for name in "abc"])

    model = FakeModel(reply, inputs=[spec(-1, 2)])
    asked = [{"name": "c"}, {"name": "a"}, {"name": "c"}]
    found = infer(model, tensor(), outputs=asked).json()["outputs"]
    assert [(each["name"], each["data"]) for each in found] == [("a", [97, 97]), ("c", [99, 99])]
    assert "it has 'a', 'b', 'c'" in error_of(infer(model, tensor(), outputs=[{"name": "d"}]))
    model = doubler()
    assert "it has 'y'" in error_of(infer(model, tensor(), outputs=[{"name": "d"}]))
    assert model.bodies == []


def test_outputs_of_different_shapes_cannot_be_one_tensor() -> None:
    def reply(index: int) -> Reply:
        return result([TensorBlob("y", "uint8", (index + 1,), bytes(index + 1), True)])

    model = FakeModel(reply, inputs=[spec(-1, 2)])
    assert "one by one" in error_of(infer(model, tensor()))
    answer = infer(FakeModel(reply, inputs=[spec(-1, 2)]), tensor(shape=[1, 2], data=[1, 2]))
    assert answer.json()["outputs"][0]["shape"] == [1, 1]


def test_numbers_that_are_not_finite_are_null() -> None:
    row = np.array([np.nan, np.inf], np.float32).tobytes()
    model = doubler()
    model._reply = lambda _: result([TensorBlob("y", "float32", (2,), row)])
    answer = infer(model, tensor(shape=[1, 2], data=[1, 2]))
    assert answer.json()["outputs"][0]["data"] == [None, None]


def scores(dtype: str, labels: tuple[str, ...]) -> FakeModel:
    rows = np.array([[0.1, 0.9, 0.3, 0.9], [4, 1, 2, 3]]).astype(dtype)
    return FakeModel(
        lambda index: result([TensorBlob("y", dtype, (4,), rows[index].tobytes())]),
        inputs=[spec(-1, 2)], interface=Interface(labels=labels),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "labels", "count", "expected"),
    [
        ("float32", ("ant", "bee", "cow", "dog"), 2,
         ["0.900000:1:bee", "0.900000:3:dog", "4.000000:0:ant", "3.000000:3:dog"]),
        ("float64", (), 1, ["0.900000:1", "4.000000:0"]),
        ("int32", ("ant",), 3, ["0:0:ant", "0:1", "0:2", "4:0:ant", "3:3", "2:2"]),
        ("uint8", (), 9, ["0:0", "0:1", "0:2", "0:3", "4:0", "3:3", "2:2", "1:1"]),
    ],
)  # fmt: skip
def test_an_output_as_its_best_classes(
    dtype: str, labels: tuple[str, ...], count: int, expected: list[str]
) -> None:
    wish: dict[str, Any] = {"classification": count}
    answer = infer(scores(dtype, labels), tensor(), outputs=[{"name": "y", "parameters": wish}])
    assert answer.json()["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [2, len(expected) // 2], "data": expected}
    ]
    wish["binary_data"] = True
    _, rest = binary_of(
        infer(scores(dtype, labels), tensor(), outputs=[{"name": "y", "parameters": wish}])
    )
    assert rest == elements(*(each.encode() for each in expected))


@pytest.mark.parametrize("count", [-1, "2", True, 1.5, None])
def test_a_number_of_classes_that_is_none_is_refused(count: object) -> None:
    wish = {"name": "y", "parameters": {"classification": count}}
    assert "classification" in error_of(infer(doubler(), tensor(), outputs=[wish]))


def test_classes_of_bools_are_refused_and_none_are_asked_for_by_zero() -> None:
    def reply(index: int) -> Reply:
        return result([TensorBlob("y", "bool", (1,), b"\1")])

    model = FakeModel(reply, inputs=[spec(-1, 2)])
    wish = {"name": "y", "parameters": {"classification": 1}}
    assert "BOOL" in error_of(infer(model, tensor(), outputs=[wish]))
    wish["parameters"] = {"classification": 0}
    assert infer(model, tensor(), outputs=[wish]).json()["outputs"][0]["data"] == [True, True]


def test_the_classes_of_one_answer_are_bounded() -> None:
    row = np.arange(20_000, dtype=np.int32)
    model = FakeModel(
        lambda _: result([TensorBlob("y", "int32", row.shape, row.tobytes())]), inputs=[spec(-1, 2)]
    )
    one = tensor(shape=[1, 2], data=[1, 2])
    wish = {"name": "y", "parameters": {"classification": 20_000}}
    assert "too many" in error_of(infer(model, one, outputs=[wish]))
    wish["parameters"] = {"classification": 2}
    found = infer(model, one, outputs=[wish]).json()["outputs"][0]
    assert found["data"] == ["19999:19999", "19998:19998"]


def test_instances_of_other_calls_keep_their_message() -> None:
    error = UnavailableError("gone", retry_after_s=7)
    model = FakeModel(lambda _: error, inputs=[spec(-1, 2)])
    answer = infer(model, tensor())
    assert error_of(answer, 503) == "instance 0 of the batch: gone"
    assert answer.headers["retry-after"] == "7"
    assert error.message == "gone"


@pytest.mark.parametrize(
    "members",
    [
        {"outputs": [{"name": "y"}] * 9000},
        {"parameters": {f"{number}": 0 for number in range(9000)}},
        {"id": "a" * 90_000},
    ],
)
def test_json_besides_data_is_bounded(members: dict[str, object]) -> None:
    model = doubler()
    assert "besides the data" in error_of(infer(model, tensor(), **members), 413)
    assert model.bodies == []


def test_long_data_is_read() -> None:
    model = doubler(spec(-1, 40_000))
    numbers = [float(number) for number in range(40_000)]
    assert infer(model, tensor(shape=[1, 40_000], data=numbers), id="a").is_success
    assert model.bodies == [np.array(numbers, "<f4").tobytes()]
    error_of(infer(model, tensor(shape=[1] * 40_000)), 413)
    body = b'{"inputs": ' + b" " * 70_000 + b"7}"
    error_of(post(endpoint(model), PATH, content=body))


def test_parameters_that_are_not_reserved_reach_the_model() -> None:
    model = doubler()
    given = {
        "top_k": 3, "name": "n", "is": True, "f": 1.5, "sequence_id": 7, "sequence_start": True,
        "headers": "h", "triton_x": 1, "binary_data_output": False, "priority": 2,
        "timeout": 5_000_000, "classification": 4,
    }  # fmt: skip
    assert infer(model, tensor(), parameters=given).status_code == 200
    ref = model.refs[0]
    assert json.loads(ref.parameters) == {"top_k": 3, "name": "n", "is": True, "f": 1.5}
    assert ref.priority == 2


@pytest.mark.parametrize("name", ["priority", "timeout", "other", "binary_data_output"])
@pytest.mark.parametrize("value", [None, [1], {}, -1, "x"])
def test_parameters_of_a_wrong_type_are_refused(name: str, value: object) -> None:
    if name == "other" and value in (-1, "x"):
        pytest.skip("the model may want it")
    assert name in error_of(infer(doubler(), tensor(), parameters={name: value}))


def test_too_many_parameters_are_a_413() -> None:
    error_of(infer(doubler(), tensor(), parameters={"a": "b" * 20_000}), 413)


@pytest.mark.parametrize(("asked", "got"), [(0, 5), (1, 1), (9, 9), (10**9, 9)])
def test_a_priority_of_one_is_the_first_and_zero_is_the_usual_one(asked: int, got: int) -> None:
    model = doubler()
    infer(model, tensor(), parameters={"priority": asked})
    assert model.refs[0].priority == got


@pytest.mark.parametrize(
    ("timeout_us", "header", "least_s", "most_s"),
    [(7_000_000, None, 0, 7), (0, None, 7, 30), (10**15, None, 30, 300), (10**15, "5000", 0, 5),
     (1_000_000, "50000", 0, 1)],
)  # fmt: skip
def test_a_timeout_in_microseconds_is_capped(
    timeout_us: int, header: str | None, least_s: int, most_s: int
) -> None:
    import time

    model = doubler()
    headers = {} if header is None else {"X-Timeout-Ms": header}
    before = time.monotonic()
    infer(model, tensor(), parameters={"timeout": timeout_us}, headers=headers)
    after = time.monotonic()
    deadline = model.refs[0].deadline
    assert before + least_s <= deadline <= after + most_s


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInputError("bad"), 400),
        (ModelFailedError("bad"), 500),
        (UnavailableError("bad"), 503),
    ],
)
def test_one_instance_that_fails_fails_its_call(error: Any, status: int) -> None:
    model = doubler()
    good = model._reply
    model._reply = lambda index: error if index == 1 else good(index)
    assert error_of(infer(model, tensor()), status) == "instance 1 of the batch: bad"


@pytest.mark.parametrize(
    "path",
    ["/v2/models//infer", "/v2/models/a/b/infer", "/v2/models/fake/versions/x/infer",
     "/v2/models/fake/versions/2/infer", "/v2/models/fake/versions//infer",
     "/v2/models//fake/infer", "/v2/models/other/infer", "/v2/models/%2Ffake/infer"],
)  # fmt: skip
def test_other_models_and_versions_are_a_404(path: str) -> None:
    error_of(infer(doubler(), tensor(), path=path), 404)


def test_names_in_paths_are_percent_encoded() -> None:
    model = doubler(name="fü nf")
    answer = infer(model, tensor(), path="/v2/models/f%C3%BC%20nf/infer")
    assert answer.json()["model_name"] == "fü nf"


def test_a_model_may_be_called_infer() -> None:
    predict = endpoint(doubler(name="infer"))
    assert not predict.takes("/v2/models/infer")
    assert infer(doubler(name="infer"), tensor(), path="/v2/models/infer/infer").is_success


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, 1)


def bare(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(body) + made.flush()


ENCODERS = [("gzip", gzipped), ("x-gzip", gzipped), ("deflate", zlib.compress), ("deflate", bare)]
WIDE = 300_000
"""Numbers that take more than may be inflated in the event loop."""


def encoded(model: FakeModel, body: bytes, encoding: str, **rest: Any) -> httpx.Response:
    headers = {"content-encoding": encoding, **rest.pop("headers", {})}
    return post(endpoint(model, **rest), PATH, content=body, headers=headers)


@pytest.mark.parametrize(("encoding", "encoder"), ENCODERS)
@pytest.mark.parametrize("size", [2, WIDE])
def test_bodies_may_be_compressed(encoding: str, encoder: Any, size: int) -> None:
    model = doubler(spec(-1, size))
    numbers = np.arange(size, dtype="<f4").tobytes()
    one = tensor(shape=[1, size], parameters={"binary_data_size": len(numbers)})
    head = json.dumps({"inputs": [one]}).encode()
    answer = encoded(model, encoder(head + numbers), encoding, headers={LENGTH: str(len(head))})
    assert answer.status_code == 200
    assert model.bodies == [numbers]


def test_parts_of_gzip_are_joined() -> None:
    body = json.dumps({"inputs": [tensor()]}).encode()
    model = doubler()
    assert encoded(model, gzipped(body[:9]) + gzipped(body[9:]), "gzip").status_code == 200
    assert len(model.bodies) == 2


def test_long_parts_of_gzip_are_joined() -> None:
    numbers = np.random.default_rng(1).bytes(4 * WIDE)  # it does not get shorter
    cut = 500_001
    model = doubler(spec(-1, WIDE))
    answer = encoded(
        model, gzipped(numbers[:cut]) + gzipped(b"") + gzipped(numbers[cut:]), "gzip",
        headers={LENGTH: "0"},
    )  # fmt: skip
    assert answer.status_code == 200
    assert model.bodies == [numbers]


@pytest.mark.parametrize(("encoding", "encoder"), ENCODERS)
def test_a_compressed_body_is_bounded_once_it_is_inflated(encoding: str, encoder: Any) -> None:
    limits = Limits(max_body_bytes=3 << 20)
    model = doubler()
    answer = encoded(model, encoder(bytes(30 << 20)), encoding, limits=limits)
    assert "once it is inflated" in error_of(answer, 413)
    assert model.bodies == []


@pytest.mark.parametrize(("encoding", "encoder"), ENCODERS)
@pytest.mark.parametrize("size", [2, WIDE])
def test_a_damaged_compressed_body_is_a_400(encoding: str, encoder: Any, size: int) -> None:
    body = encoder(np.arange(size, dtype="<f4").tobytes())
    for wrong in (body[:-6], body[:5], b"", b"\xff" * 40, body + b"more"):
        error_of(encoded(doubler(), wrong, encoding))


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "x", "compress"])
def test_another_encoding_is_a_415_that_names_ours(encoding: str) -> None:
    answer = encoded(doubler(), b"{}", encoding)
    assert "gzip" in error_of(answer, 415)
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [("gzip", "gzip"), ("deflate", "deflate"), ("gzip;q=0.1, deflate", "deflate"),
     ("br, gzip", "gzip"), ("*", None), ("gzip;q=0", None), ("identity", None)],
)  # fmt: skip
def test_answers_are_compressed_only_if_asked(accept: str, expected: str | None) -> None:
    for parameters in ({}, {"binary_data_output": True}):
        answer = infer(
            doubler(), tensor(), headers={"accept-encoding": accept}, parameters=parameters
        )
        assert answer.headers.get("content-encoding") == expected
        head = binary_of(answer)[0] if parameters else answer.json()
        assert head["outputs"][0]["name"] == "y"


def test_large_answers_are_sent_as_they_are() -> None:
    data = bytes(2 << 20)
    model = FakeModel(
        lambda _: result([TensorBlob("y", "uint8", (len(data),), data)]), inputs=[spec(-1, 2)]
    )
    answer = infer(
        model, tensor(shape=[1, 2], data=[1, 2]),
        headers={"accept-encoding": "gzip"}, parameters={"binary_data_output": True},
    )  # fmt: skip
    assert "content-encoding" not in answer.headers
    assert "ask for it as binary" in error_of(infer(model, tensor(shape=[1, 2], data=[1, 2])))


def test_nobody_computes_a_body_whose_client_hung_up_while_it_was_inflated() -> None:
    async def go() -> tuple[FakeModel, list[Answered]]:
        model, answers = doubler(spec(-1, WIDE)), []
        headers = [(b"content-encoding", b"gzip"), (LENGTH.lower().encode(), b"0")]
        are_answered = asyncio.Event()

        def on_answer(reply: Answered) -> None:
            answers.append(reply)
            if len(answers) == 2:
                are_answered.set()

        wire = NoWire(on_answer)
        exchanges = [
            Exchange.open(wire, endpoint(model), "POST", PATH, b"", headers) for _ in range(3)
        ]
        for exchange in exchanges:
            exchange.start()
            exchange.feed(gzipped(bytes(4 * WIDE)))
            exchange.complete()
        assert not model.bodies
        exchanges[0].abandon()
        await are_answered.wait()
        return model, answers

    model, answers = asyncio.run(go())
    assert [reply[0] for reply in answers] == [200, 200]
    assert model.bodies == [bytes(4 * WIDE)] * 2


def test_a_body_is_not_inflated_once_its_client_has_hung_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Inflation] = []

    def run(self: Inflation, until_bytes: int | None = None) -> None:
        if until_bytes is None:
            begun.append(self)

    monkeypatch.setattr(Inflation, "run", run)

    async def go() -> Predict:
        predict, may_go = endpoint(doubler()), threading.Event()
        for _ in range(2):
            inflaters().submit(may_go.wait)
        exchanges = [
            Exchange.open(
                NoWire(), predict, "POST", PATH, b"", [(b"content-encoding", b"gzip")]
            )
            for _ in range(3)
        ]  # fmt: skip
        for exchange in exchanges:
            exchange.start()
            exchange.feed(gzipped(bytes(4 * WIDE)))
            exchange.complete()
        for exchange in exchanges:
            exchange.abandon()
        await asyncio.sleep(0)  # then the futures tell their threads
        may_go.set()
        inflaters().submit(int).result()
        return predict

    assert asyncio.run(go()).unfinished.num_bytes == 0
    assert begun == []


def test_bodies_that_wait_to_be_inflated_count_by_what_they_become() -> None:
    async def go() -> list[int]:
        answers: list[Answered] = []
        are_answered = asyncio.Event()

        def on_answer(reply: Answered) -> None:
            answers.append(reply)
            if len(answers) == 4:
                are_answered.set()

        limits, wire = Limits(max_body_bytes=8 << 20), NoWire(on_answer)
        predict = endpoint(doubler(), limits=limits, unfinished=UnfinishedRequests(20 << 20))
        for _ in range(4):
            headers = [(b"content-encoding", b"gzip")]
            exchange = Exchange.open(wire, predict, "POST", PATH, b"", headers)
            exchange.start()
            exchange.feed(gzipped(bytes(8 << 20)))
            exchange.complete()
        await are_answered.wait()
        assert predict.unfinished.num_bytes == 0
        return [reply[0] for reply in answers]

    assert asyncio.run(go()) == [429, 429, 413, 413]


def test_a_model_without_outputs_answers_tensors_with_tensors() -> None:
    model = FakeModel(lambda _: result([TensorBlob("x", "float32", (2,), bytes(8))]))
    answer = infer(model, tensor())
    assert answer.json()["outputs"][0]["shape"] == [2, 2]
    assert [header.shape for ref in model.refs for header in ref.headers] == [(2,), (2,)]
