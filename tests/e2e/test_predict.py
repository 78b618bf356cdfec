"""Real photographs through real worker processes, in every form that a request may have."""

import asyncio
import base64
import contextlib
import io

import httpx
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests.e2e.running import Running, running
from tests.models.items import encoded, jpeg, photo

AS_NPY = {"Content-Type": "image/jpeg", "Accept": "application/x-npy"}
SMALL = {"source": "tests.small_classifier:SmallClassifier"}


@pytest.fixture(scope="module")
def service():
    models = {"efficientnet_lite0": {}, "small": SMALL}
    settings = {"default_model": "efficientnet_lite0", "models": models}
    with running(settings=settings) as service:
        yield service


def post(
    service: Running, body: bytes, content_type: str = "image/jpeg", path: str = "/predict"
) -> list:
    answer = service.post(path, content=body, headers={"Content-Type": content_type})
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def in_base64(photo: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(photo).decode()}


def test_chelsea_is_a_cat_and_coffee_an_espresso(service: Running):
    (cat,) = post(service, jpeg("chelsea"))
    assert "cat" in cat[0]["label"].lower()
    (coffee,) = post(service, jpeg("coffee"))
    assert coffee[0]["label"] in ("espresso", "cup")
    scores = [entry["score"] for entry in coffee]
    assert scores == sorted(scores, reverse=True)
    assert len(coffee) == 5


def test_every_form_of_the_same_picture_has_the_same_answer(service: Running):
    data = jpeg("chelsea")
    (expected,) = post(service, data)
    assert service.predict(in_base64(data)) == [expected]
    form = service.post(files={"file": ("cat.jpg", data, "image/jpeg")})
    assert form.json()["predictions"] == [expected]

    array = np.asarray(Image.open(io.BytesIO(data)))
    npy = io.BytesIO()
    np.save(npy, array)
    assert post(service, npy.getvalue(), "application/x-npy") == [expected]
    tensors = safetensors.numpy.save({"image": array})
    assert post(service, tensors, "application/safetensors") == [expected]
    path = f"/predict?dtype=uint8&shape={','.join(map(str, array.shape))}"
    assert post(service, array.tobytes(), "application/octet-stream", path) == [expected]
    assert post(service, encoded(Image.fromarray(array), "PNG"), "image/png") == [expected]

    small = array[::4, ::4]
    assert service.predict(small.tolist()) == post(
        service, encoded(Image.fromarray(small), "PNG"), "image/png"
    )


def test_answer_equals_the_model_called_in_process(service: Running):
    import torch

    from inferpool.models.item import Item
    from inferpool.models.sources.registry import build
    from inferpool.models.spec import Placement

    model = build("efficientnet_lite0", "DEFAULT", {})
    model.load(Placement(devices=("cpu",)))
    data = jpeg("astronaut")
    with torch.inference_mode():
        features = model.preprocess(Item(kind="image", payload=memoryview(data)))
        outputs = model.postprocess(model.forward(model.collate([features])))
    scores = np.load(io.BytesIO(service.post(content=data, headers=AS_NPY).content))
    assert scores.shape == (1000,)
    assert np.abs(scores - outputs["probabilities"][0].numpy()).max() <= 1e-4


def test_many_files_are_answered_in_order(service: Running):
    names = ["chelsea", "coffee", "rocket", "astronaut"] * 3
    files = [("file", (name, jpeg(name), "image/jpeg")) for name in names]
    answers = service.post(files=files).json()["predictions"]
    alone = {name: post(service, jpeg(name))[0] for name in set(names)}
    for name, answer in zip(names, answers, strict=True):
        assert answer[0]["label"] == alone[name][0]["label"]
        assert abs(answer[0]["score"] - alone[name][0]["score"]) < 1e-4


def test_instance_that_fails_is_an_error_at_its_own_place(service: Running):
    good, bad = in_base64(jpeg("coffee")), in_base64(jpeg("coffee")[:2000])
    first, second, third = service.predict(good, bad, good)
    assert first[0]["label"] == third[0]["label"]
    assert second["error"]["code"] == "invalid_input"
    assert second["error"]["status"] == 422


def test_500_concurrent_requests_with_500_different_images_get_each_its_own_answer(
    service: Running,
):
    generator = np.random.default_rng(0)
    pixels = np.asarray(photo("chelsea"))
    rolled = (np.roll(pixels, generator.integers(0, 300), axis=1) for _ in range(500))
    bodies = [
        encoded(Image.fromarray(each[i % 90 :, i % 120 :]), quality=80)
        for i, each in enumerate(rolled)
    ]
    url = f"{service.url}/predict/small"

    async def ask() -> list[httpx.Response]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [  # several, since httpx walks through all connections for each request
                await stack.enter_async_context(httpx.AsyncClient(timeout=120, verify=False))
                for _ in range(20)
            ]
            headers = AS_NPY | {"X-Timeout-Ms": "120000"}
            posts = [
                clients[i % 20].post(url, content=body, headers=headers)
                for i, body in enumerate(bodies)
            ]
            return await asyncio.gather(*posts)

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200] * 500
    scores = np.stack([np.load(io.BytesIO(answer.content)) for answer in answers])
    for i in range(0, 500, 50):
        alone = service.post("/predict/small", content=bodies[i], headers=AS_NPY)
        distances = np.abs(scores - np.load(io.BytesIO(alone.content))).max(axis=1)
        assert distances[i] <= 1e-4
        assert distances.argmin() == i or distances.min() == distances[i]
