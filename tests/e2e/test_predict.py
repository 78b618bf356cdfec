"""Real photographs through real worker processes, in every form that a request may have."""

import asyncio
import base64
import contextlib
import io
import json

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.e2e.photos import encoded, jpeg, pixels
from tests.e2e.running import Running, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    config = tmp_path_factory.mktemp("predict") / "inferpool.toml"
    config.write_text(
        """
        default_model = "efficientnet_lite0"
        [models.efficientnet_lite0]
        [models.small]
        source = "tests.small_classifier:SmallClassifier"
        """
    )
    with running("--config", str(config)) as service:
        yield service


@pytest.fixture
def client(service: Running):
    with httpx.Client(base_url=service.url, timeout=30) as client:
        yield client


def post(client: httpx.Client, body: bytes, content_type: str, path: str = "/predict") -> list:
    answer = client.post(path, content=body, headers={"Content-Type": content_type})
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def test_chelsea_is_a_cat_and_coffee_an_espresso(client: httpx.Client):
    (cat,) = post(client, jpeg("chelsea"), "image/jpeg")
    assert "cat" in cat[0]["label"].lower()
    (coffee,) = post(client, jpeg("coffee"), "image/jpeg")
    assert coffee[0]["label"] in ("espresso", "cup")
    scores = [entry["score"] for entry in coffee]
    assert scores == sorted(scores, reverse=True)
    assert len(coffee) == 5


def test_every_form_of_the_same_picture_has_the_same_answer(client: httpx.Client):
    photo = jpeg("chelsea")
    (expected,) = post(client, photo, "image/jpeg")

    b64 = {"instances": [{"b64": base64.b64encode(photo).decode()}]}
    assert post(client, json.dumps(b64).encode(), "application/json") == [expected]

    form = client.post("/predict", files={"file": ("cat.jpg", photo, "image/jpeg")})
    assert form.json()["predictions"] == [expected]

    from PIL import Image

    array = np.asarray(Image.open(io.BytesIO(photo)))
    npy = io.BytesIO()
    np.save(npy, array)
    assert post(client, npy.getvalue(), "application/x-npy") == [expected]

    tensors = safetensors.numpy.save({"image": array})
    assert post(client, tensors, "application/safetensors") == [expected]

    shape = ",".join(map(str, array.shape))
    path = f"/predict?dtype=uint8&shape={shape}"
    assert post(client, array.tobytes(), "application/octet-stream", path) == [expected]

    assert post(client, encoded(array, "PNG"), "image/png") == [expected]

    small = array[::4, ::4]
    (want,) = post(client, encoded(small, "PNG"), "image/png")
    numbers = json.dumps({"instances": [small.tolist()]}).encode()
    assert post(client, numbers, "application/json") == [want]


def test_answer_equals_the_model_called_in_process(client: httpx.Client):
    import torch

    from inferpool.models.item import Item
    from inferpool.models.sources.registry import build
    from inferpool.models.spec import Placement

    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cpu",)))
    photo = jpeg("astronaut")
    with torch.inference_mode():
        features = model.preprocess(Item(kind="image", payload=memoryview(photo)))
        outputs = model.postprocess(model.forward(model.collate([features])))
    answer = client.post(
        "/predict",
        content=photo,
        headers={"Content-Type": "image/jpeg", "Accept": "application/x-npy"},
    )
    scores = np.load(io.BytesIO(answer.content))
    assert scores.shape == (1000,)
    assert np.abs(scores - outputs["probabilities"][0].numpy()).max() <= 1e-4


def test_many_files_are_answered_in_order(client: httpx.Client):
    names = ["chelsea", "coffee", "rocket", "astronaut"] * 3
    files = [("file", (name, jpeg(name), "image/jpeg")) for name in names]
    answers = client.post("/predict", files=files).json()["predictions"]
    alone = {name: post(client, jpeg(name), "image/jpeg")[0] for name in set(names)}
    for name, answer in zip(names, answers, strict=True):
        assert answer[0]["label"] == alone[name][0]["label"]
        assert abs(answer[0]["score"] - alone[name][0]["score"]) < 1e-4


def test_instance_that_fails_is_an_error_at_its_own_place(client: httpx.Client):
    good = {"b64": base64.b64encode(jpeg("coffee")).decode()}
    bad = {"b64": base64.b64encode(jpeg("coffee")[:2000]).decode()}
    answer = client.post("/predict", json={"instances": [good, bad, good]})
    assert answer.status_code == 200
    first, second, third = answer.json()["predictions"]
    assert first[0]["label"] == third[0]["label"]
    assert second["error"]["code"] == "invalid_input"
    assert second["error"]["status"] == 422


def test_parameters_choose_how_many_classes(client: httpx.Client):
    photo = {"b64": base64.b64encode(jpeg("coffee")).decode()}
    body = {"instances": [photo], "parameters": {"top_k": 2}}
    assert len(client.post("/predict", json=body).json()["predictions"][0]) == 2
    assert len(post(client, jpeg("coffee"), "image/jpeg", "/predict?top_k=1")[0]) == 1
    answer = client.post("/predict", json={**body, "parameters": {"top_k": 0}})
    assert answer.status_code == 422
    assert "top_k" in answer.json()["detail"]


def test_500_concurrent_requests_with_500_different_images_get_each_its_own_answer(
    service: Running,
):
    generator = np.random.default_rng(0)
    photo = pixels("chelsea")
    bodies = [
        encoded(np.roll(photo, generator.integers(0, 300), axis=1)[i % 90 :, i % 120 :], quality=80)
        for i in range(500)
    ]

    async def ask() -> list[httpx.Response]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [  # several, since httpx walks through all connections for each request
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=service.url, timeout=120, verify=False)
                )
                for _ in range(20)
            ]
            headers = {
                "Content-Type": "image/jpeg",
                "Accept": "application/x-npy",
                "X-Timeout-Ms": "120000",
            }
            posts = [
                clients[i % 20].post("/predict/small", content=body, headers=headers)
                for i, body in enumerate(bodies)
            ]
            return await asyncio.gather(*posts)

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200] * 500
    scores = np.stack([np.load(io.BytesIO(answer.content)) for answer in answers])
    with httpx.Client(base_url=service.url) as client:
        for i in range(0, 500, 50):
            headers = {"Content-Type": "image/jpeg", "Accept": "application/x-npy"}
            alone = client.post("/predict/small", content=bodies[i], headers=headers)
            expected = np.load(io.BytesIO(alone.content))
            distances = np.abs(scores - expected).max(axis=1)
            assert distances[i] <= 1e-4
            assert distances.argmin() == i or distances.min() == distances[i]


def test_answers_carry_id_trace_and_timing(client: httpx.Client):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Content-Type": "image/jpeg", "X-Request-ID": "my-id", "traceparent": trace}
    answer = client.post("/predict", content=jpeg("coffee"), headers=headers)
    assert answer.headers["x-request-id"] == "my-id"
    assert answer.headers["traceparent"].split("-")[1] == trace.split("-")[1]
    for step in ("queue;dur=", "preprocess;dur=", "inference;dur=", "total;dur="):
        assert step in answer.headers["server-timing"]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"path": "/predict/nobody"}, 404, "unknown_model"),
        ({"headers": {"Content-Type": "application/pdf"}}, 415, "unsupported_type"),
        ({"content": b"no picture"}, 422, "invalid_input"),
        ({"content": b""}, 422, "invalid_input"),
        ({"headers": {"Content-Type": "application/json"}}, 400, "bad_request"),
        ({"headers": {"Content-Type": "image/jpeg", "X-Timeout-Ms": "soon"}}, 400, "bad_request"),
        ({"content": bytes(17 << 20)}, 413, "too_large"),
    ],
)
def test_errors_are_problems_with_a_stable_code(client: httpx.Client, change, status, code):
    request = {"headers": {"Content-Type": "image/jpeg"}, "content": jpeg("coffee"), **change}
    answer = client.post(request.pop("path", "/predict"), **request)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]


def test_deadline_of_the_request_is_kept(client: httpx.Client):
    headers = {"Content-Type": "image/jpeg", "X-Timeout-Ms": "1"}
    answer = client.post("/predict", content=jpeg("coffee"), headers=headers)
    assert answer.status_code in (504, 429)


def test_health_metrics_and_docs_answer(client: httpx.Client):
    health = client.get("/health").json()
    assert health["status"] == "ready"
    workers = health["models"][0]["workers"]
    assert all(worker["state"] == "ready" and worker["pid"] for worker in workers)
    assert client.get("/health/live").status_code == 200
    text = client.get("/metrics").text
    for name in (
        "inferpool_requests_total",
        "inferpool_queue_wait_seconds_bucket",
        "inferpool_batch_size_bucket",
        'inferpool_workers{model="efficientnet_lite0",state="ready"}',
    ):
        assert name in text
    assert "swagger" in client.get("/docs").text.lower()
    assert "/predict/{model}" in client.get("/openapi.json").json()["paths"]
