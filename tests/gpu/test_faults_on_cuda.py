"""What a CUDA device does when it runs out of memory, or loses its context."""

import httpx
import pytest

from tests.e2e.running import Running, running

pytestmark = pytest.mark.gpu

GREEDY = "tests.gpu.cuda_fault_model:CudaFaultModel"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    config = tmp_path_factory.mktemp("service") / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "{GREEDY}"
        devices = "cuda:0"
        replicas = 1
        max_batch_size = 8
        """
    )
    with running("--config", str(config)) as service:
        yield service


def predict(service: Running, *instances: dict) -> list[dict]:
    body = {"instances": list(instances)}
    return httpx.post(f"{service.url}/predict", json=body, timeout=120).json()["predictions"]


def worker(service: Running) -> dict:
    (worker,) = httpx.get(f"{service.url}/health").json()["models"][0]["workers"]
    return worker


def test_batch_that_does_not_fit_is_halved_and_the_worker_lives(service: Running):
    pid = worker(service)["pid"]
    # A quarter of the device for each row: eight rows never fit, two do.
    answers = predict(service, *({"n": n, "share": 0.25} for n in range(8)))
    assert [answer["twice"] for answer in answers] == [2 * n for n in range(8)]
    assert worker(service)["pid"] == pid
    service.wait_for_log("inputs of this shape at once", 5)


def test_input_that_does_not_fit_alone_fails_and_its_memory_is_returned(service: Running):
    pid = worker(service)["pid"]
    good, bad = predict(service, {"n": 1, "share": 0.01}, {"n": 2, "share": 2.0})
    assert good["twice"] == 2
    assert bad["error"]["code"] == "model_error"
    assert "out of memory on this input alone" in bad["error"]["message"]
    (again,) = predict(service, {"n": 3, "share": 0.7})
    assert again["twice"] == 6
    assert worker(service)["pid"] == pid


def test_device_side_assert_recycles_the_worker_and_fails_its_input_alone(service: Running):
    body = {"instances": [{"n": 1, "share": 0.0, "assert": True}]}
    answer = httpx.post(f"{service.url}/predict", json=body, timeout=120)
    assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
    service.wait_for_log("the device's context is lost", 5)
    (after,) = predict(service, {"n": 4, "share": 0.01})
    assert after["twice"] == 8
    ending = worker(service)["last_ending"]
    assert ending["cause"] == "device"
    assert "device-side assert" in ending["reason"]
