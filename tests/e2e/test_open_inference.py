"""Infer requests of the Open Inference Protocol through a real service with two front ends."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from inferpool.models.spec import DTYPE_BYTES
from inferpool.service.parts.open_inference.values import DATATYPES
from tests.e2e.running import Running, running
from tests.open_inference_model import WIDTH

LENGTH = "Inference-Header-Content-Length"
KEY = "an-admin-key-of-this-test"


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    module = "tests.open_inference_model"
    models = {
        name: {"source": f"{module}:{source}", "replicas": 1}
        for name, source in [("types", "AllTypes"), ("sums", "RowSums"), ("lengths", "TextLengths")]
    }
    models["parts"] = {"source": "tests.streaming_model:CountingStream", "replicas": 1}
    env = {"INFERPOOL_ADMIN_KEYS": KEY}
    with running(settings={"models": models, "front_ends": 2}, env=env) as service:
        yield service


def infer(
    http: httpx.Client,
    url: str,
    model: str,
    inputs: Sequence[Mapping[str, Any]],
    tail: bytes = b"",
    **members: Any,
) -> httpx.Response:
    head = json.dumps({"inputs": inputs, **members}).encode()
    headers = {LENGTH: str(len(head)), "accept-encoding": "identity"}
    return http.post(f"{url}/v2/models/{model}/infer", content=head + tail, headers=headers)


def test_all_dtypes_come_back_as_they_went(service: Running) -> None:
    data = bytes(range(48))
    pieces = {}
    for dtype, size in DTYPE_BYTES.items():
        pieces[dtype] = b"\0\1" * 3 if dtype == "bool" else data[: 6 * size]
    inputs = [
        {
            "name": f"in_{dtype}",
            "datatype": DATATYPES[dtype],
            "shape": [2, 3],
            "parameters": {"binary_data_size": len(piece)},
        }
        for dtype, piece in pieces.items()
    ]
    tail = b"".join(pieces.values())
    answer = infer(
        service.http, service.url, "types", inputs, tail, parameters={"binary_data_output": True}
    )
    assert answer.status_code == 200, answer.text
    length = int(answer.headers[LENGTH])
    head = json.loads(answer.content[:length])
    assert [each["name"] for each in head["outputs"]] == [f"out_{dtype}" for dtype in DTYPE_BYTES]
    assert answer.content[length:] == tail


def test_bodies_without_json_go_on_being_answered_on_one_connection(service: Running) -> None:
    with httpx.Client(timeout=60) as http:
        for number in range(5):
            row = np.full(WIDTH, number, "<f4")
            answer = http.post(
                f"{service.url}/v2/models/sums/infer", content=row.tobytes(), headers={LENGTH: "0"}
            )
            length = int(answer.headers[LENGTH])
            head = json.loads(answer.content[:length])
            assert head["outputs"][0]["shape"] == [1, 2]
            assert np.frombuffer(answer.content[length:], "<f4").tolist() == [
                WIDTH * number,
                number,
            ]


def test_both_front_ends_know_the_names_of_classes(service: Running) -> None:
    one = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH]}
    one["parameters"] = {"binary_data_size": 4 * WIDTH}
    row = np.full(WIDTH, 2, "<f4").tobytes()
    wish = [{"name": "y", "parameters": {"classification": 2}}]
    for _ in range(4):  # the kernel chooses the front end
        answer = infer(service.http, service.url, "sums", [one], row, outputs=wish)
        (output,) = answer.json()["outputs"]
        assert output["data"] == [f"{2 * WIDTH}.000000:0:all", "2.000000:1:first"]


def test_a_model_of_texts_answers_texts_and_objects(service: Running) -> None:
    one = {"name": "input", "datatype": "BYTES", "shape": [2, 1], "data": ["four", "fünfe"]}
    answer = infer(service.http, service.url, "lengths", [one])
    (output,) = answer.json()["outputs"]
    assert [json.loads(each) for each in output["data"]] == [{"length": 4}, {"length": 5}]
    one |= {"data": ['{"t":"a"}', '{"t":"bc"}'], "parameters": {"content_type": "application/json"}}
    answer = infer(service.http, service.url, "lengths", [one], parameters={"as_text": True})
    assert answer.json()["outputs"][0]["data"] == ["a", "aa"]
    one["data"][1] = "{}"
    answer = infer(service.http, service.url, "lengths", [one])
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("instance 1 of the batch")


def test_a_stream_is_answered_as_a_whole(service: Running) -> None:
    one = {"name": "input", "datatype": "BYTES", "shape": [1, 1], "data": ['{"n": 7, "parts": 3}']}
    one["parameters"] = {"content_type": "application/json"}
    answer = infer(service.http, service.url, "parts", [one])
    assert json.loads(answer.json()["outputs"][0]["data"][0]) == [7, 8, 9]


def test_numbers_that_a_worker_refuses_are_a_400(service: Running) -> None:
    row = np.full(WIDTH, np.nan, "<f4").tobytes()
    answer = service.post("/v2/models/sums/infer", content=row, headers={LENGTH: "0"})
    assert answer.status_code == 400
    assert "nan" in answer.json()["error"]


def test_the_other_routes_are_answered_for_both_front_ends(service: Running) -> None:
    get, post = service.get, service.post
    for _ in range(4):  # the kernel chooses the front end
        assert get("/v2/").json() == get("/v2").json()
        assert get("/v2/health/ready").json() == {"ready": True, "live": True}
        (x,) = get("/v2/models/sums/versions/1").json()["inputs"]
        assert x == {"name": "x", "datatype": "FP32", "shape": [-1, WIDTH]}
        (one,) = get("/v2/models/parts/stats").json()["model_stats"]
        assert (one["name"], one["version"]) == ("parts", "1")
        index = post("/v2/repository/index", json={"ready": True}).json()
        assert {each["name"] for each in index} == {"types", "sums", "lengths", "parts"}
        assert post("/v2/repository/index", content=b"{").status_code == 400
    with httpx.Client(base_url=service.url, timeout=60) as http:  # on one connection
        for _ in range(3):
            refused = http.post("/v2/systemsharedmemory/region/a/register", json={"key": "/a"})
            assert (refused.status_code, "not supported" in refused.json()["error"]) == (400, True)


def test_an_operator_unloads_a_model_and_loads_it_again(service: Running) -> None:
    def change(what: str, key: str = KEY, **options: Any) -> httpx.Response:
        path = f"/v2/repository/models/lengths/{what}"
        return service.post(path, headers={"x-api-key": key}, **options)

    def ask() -> httpx.Response:
        one = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ["four"]}
        return infer(service.http, service.url, "lengths", [one])

    assert change("unload", key="no").status_code == 401
    assert change("load", json={"parameters": {"config": "{}"}}).status_code == 400
    assert ask().status_code == 200
    assert change("unload", json={"parameters": {"unload_dependents": True}}).status_code == 200
    answer = ask()
    assert (answer.status_code, "lengths" in answer.json()["error"]) == (404, True)
    index = service.post("/v2/repository/index").json()
    assert {each["state"] for each in index if each["name"] == "lengths"} == {"UNAVAILABLE"}
    service.wait_for_log("admin: unload lengths")
    assert change("load").status_code == 200
    assert ask().json()["model_version"] == "2"
