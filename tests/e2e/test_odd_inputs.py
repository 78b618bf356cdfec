"""What clients send in forms that models do not expect, through real services."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.e2e import forked
from tests.e2e.running import Running, running, status_of, until
from tests.models.items import encoded, photo
from tests.models.vision.test_gray import CERTAIN, UNCERTAIN
from tests.ports import free_port

PICTURE = encoded(photo("coffee").resize((90, 60)))
CARELESS = {"source": "tests.careless_model:Careless"}
SMALL = {"source": "tests.careless_model:SmallApart"}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    models = {
        "careless": {**CARELESS, "decoders": 1},
        "rooted": {"source": "tests.careless_model:Rooted"},
        "small": {**SMALL, "decoders": 0},
        "decoded": {**SMALL, "decoders": 1},
    }
    settings = {"models": {name: {**model, "replicas": 1} for name, model in models.items()}}
    with running("--front-ends", "1", settings=settings) as service:
        yield service


def post(service: Running, path: str, body: bytes, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return service.post(path, content=body, headers=names)


def npy(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_nan_of_a_client_is_its_own_error_in_every_form_of_a_tensor(service: Running):
    x = np.array([1, np.nan, 3], np.float32)
    ways = [
        (x.tobytes(), "application/octet-stream"),
        (npy(x), "application/x-npy"),
        (npy(np.stack([x, x])), "application/x-npy"),
        (safetensors.numpy.save({"x": x}), "application/safetensors"),
        (
            b'{"instances":[{"x":{"b64":"%s"}}]}' % base64.b64encode(x.tobytes()),
            "application/json",
        ),
    ]
    for body, content_type in ways:
        for accept in ("application/json", "application/x-npy"):
            answer = post(
                service, "/predict/rooted", body, content_type=content_type, accept=accept
            )
            assert answer.status_code == 422, answer.text
            assert answer.json()["code"] == "invalid_input"
            assert "nan at [1]" in answer.json()["detail"]
    answer = service.ask([1, 4, 9], [1, -4, 9], path="/predict/rooted")
    first, second = answer.json()["predictions"]
    assert first == [1, 2, 3]
    assert second["error"]["code"] == "non_finite_output"
    logged = service.wait_for_log("the model's output for this input has NaN")
    errors = [line for line in service.log if line["level"] == logged["level"]]
    assert errors == [logged], "only the model's own NaN is logged as an error"


def num_decoded(service: Running, model: str) -> int:
    return sum(each["num_decoded"] for each in service.worker(model)["decoders"])


def wait_for_decoder(service: Running, model: str, body: bytes) -> int:
    """Ask until a decoder has prepared something; return how much."""

    def has_decoded() -> bool:
        post(service, f"/predict/{model}", body)
        return num_decoded(service, model) > 0

    until(has_decoded)
    return num_decoded(service, model)


def test_odd_json_is_the_clients_error_if_a_careless_model_raises_on_it(service: Running):
    path = "/predict/careless"
    wait_for_decoder(service, "careless", b'{"instances":[{"x":4}]}')
    answer = service.ask({"x": 4}, {"y": 1}, {"x": 0}, {"x": "a"}, [], {"y": 2}, path=path)
    found = answer.json()["predictions"]
    assert found[0] == {"y": 2, "logs": [None, pytest.approx(0.693, abs=0.001)]}
    assert [each["error"]["code"] for each in found[1:]] == [
        "invalid_input", "non_finite_output", *["invalid_input"] * 3
    ]  # fmt: skip
    assert found[1]["error"]["message"].endswith("preprocess raised KeyError")
    assert found[2]["error"]["message"].endswith("-inf at logs[1], for which JSON has no form")
    assert service.metric('instances_unfit_total{model="careless"}') == 4
    line = service.wait_for_log("preprocess raised KeyError: 'x' on a client's JSON at ")
    assert "careless_model.py:" in str(line["message"])
    huge = service.post(path, content=b'{"instances":[{"x":1e999}]}')
    assert huge.status_code == 422
    assert huge.json()["detail"] == "instances[0]: 1e999 at x is out of range"


def test_bodies_without_a_type_are_known_by_their_first_bytes(service: Running):
    for body in (b'{"instances":[{"x":4}]}', b'\xef\xbb\xbf{"instances":[{"x":4}]}'):
        assert post(service, "/predict/careless", body).json()["predictions"][0]["y"] == 2
    expected = post(service, "/predict/small", PICTURE, content_type="image/jpeg").json()
    for body in (PICTURE, PICTURE[:-2], npy(np.zeros((9, 9, 3), np.uint8)), PICTURE):
        answer = post(service, "/predict/small", body)
        assert answer.status_code == 200, answer.text
        assert (answer.json() == expected) is (body in (PICTURE, PICTURE[:-2]))
    assert post(service, "/predict/small", b"?").status_code == 415
    refused = post(service, "/predict/careless", b"x", content_encoding="gzip", content_type="a/b")
    assert refused.status_code == 415
    refused = post(
        service, "/predict/careless", b"x", content_encoding="gzip", content_type="image/png"
    )
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")


def test_gray_pictures_are_the_same_to_decoders_and_workers(service: Running):
    before = wait_for_decoder(service, "decoded", PICTURE)
    answers = {}
    for model in ("small", "decoded"):
        ask = [
            post(service, f"/predict/{model}", data, content_type="image/tiff")
            for data in [make() for make in CERTAIN.values()]
            + [make() for make, _ in UNCERTAIN.values()]
        ]
        assert [each.status_code for each in ask] == [200] * len(CERTAIN) + [422] * len(UNCERTAIN)
        answers[model] = [each.json().get("predictions", each.json().get("detail")) for each in ask]
    assert answers["small"] == answers["decoded"]
    until(lambda: num_decoded(service, "decoded") - before >= len(CERTAIN))


def test_texts_of_errors_are_shown_if_a_flag_says_so():
    settings = {"models": {"careless": CARELESS}}
    with running("--show-errors", "--front-ends", "1", settings=settings) as service:
        assert service.ask({"y": 1}).json()["detail"] == (
            "instances[0]: preprocess raised KeyError: 'x'"
        )


@pytest.mark.parametrize(
    ("env", "shown"), [({}, True), ({"INFERPOOL_PREDICT_KEYS": "k" * 40}, False)]
)
def test_texts_of_errors_are_shown_at_a_terminal_without_keys(env: dict[str, str], shown: bool):
    port = free_port()
    ours, theirs = os.openpty()
    process = forked.popen(
        [sys.executable, "-m", "inferpool", "serve", "tests.careless_model:Careless",
         "--port", str(port), "--front-ends", "1", "--speed", "exact"],
        env={**os.environ, "PYTHONPATH": forked.python_path(), **env},
        stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    key = {"x-api-key": "k" * 40}

    try:
        until(lambda: status_of(f"{url}/health/ready") == 200)
        body = {"instances": [{"y": 1}]}
        detail = httpx.post(f"{url}/predict", json=body, headers=key).json()["detail"]
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)
        os.close(theirs)
    assert ("'x'" in detail) is shown, detail
