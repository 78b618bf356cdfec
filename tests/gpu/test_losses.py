"""Devices that fail: their workers end and are replaced, and no other is harmed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.running import Running, asking, faulty, running, until
from tests.gpu.conftest import Devices

MODEL = "tests.gpu.device_models:DeviceFaultModel"


@pytest.fixture(scope="module")
def service(devices: Devices) -> Iterator[Running]:
    with running(settings=faulty(source=MODEL, devices=devices.named(0))) as service:
        yield service


def test_device_side_assert_recycles_the_worker_and_fails_its_input_alone(service: Running):
    answer = service.ask({"n": 1, "do": "assert"}, timeout=120)
    assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
    service.wait_for_log("the device's context is lost", 5)
    assert service.predict({"n": 4}, timeout=120)[0]["twice"] == 8
    ending = service.workers()[0]["last_ending"]
    assert ending["cause"] == "device"
    assert "assert" in ending["reason"]


def test_innocent_inputs_in_the_batch_of_a_device_side_assert_are_answered(service: Running):
    with ThreadPoolExecutor(9) as pool:
        guilty = pool.submit(service.ask, {"n": 100, "do": "assert"}, timeout=120)
        answers = [pool.submit(service.predict, {"n": n}, timeout=120) for n in range(8)]
        assert [answer.result()[0]["twice"] for answer in answers] == [2 * n for n in range(8)]
        assert guilty.result().json()["code"] == "worker_crashed"


def test_lost_device_costs_no_answer_and_its_worker_returns_with_it(
    devices: Devices, tmp_path: Path
):
    lost = lost_on_demand(devices, tmp_path)
    numbers = iter(range(10**9))
    with running(settings=two_devices(devices, lost)) as service:
        first, second = service.workers()
        assert first["device"].endswith(devices.uuids[0])

        def sick() -> dict[str, object]:
            return dict(service.workers()[0])

        with asking(lambda: service.ask({"n": next(numbers)}), num_clients=4) as answers:
            lost.write_text(devices.uuids[0].partition("-")[2])
            until(lambda: sick()["state"] == "backoff" and "failed" in str(sick()["reason"]))
            num_answers = len(answers)
            until(lambda: len(answers) > num_answers + 20)
            while_lost = answers[num_answers:]
            lost.unlink()
            until(lambda: sick()["state"] == "ready")
        assert {answer.status_code for answer in answers} == {200}
        places = {answer.json()["predictions"][0]["device"] for answer in while_lost}
        assert [devices.uuids[1].endswith(place) for place in places] == [True]
        assert service.workers()[1]["pid"] == second["pid"]


def test_device_that_is_lost_from_the_start_is_given_up_and_the_others_serve(
    devices: Devices, tmp_path: Path
):
    lost = lost_on_demand(devices, tmp_path)
    lost.write_text(devices.uuids[0].partition("-")[2])
    settings = two_devices(devices, lost, max_restarts=1)
    with running(settings=settings, ready=False) as service:
        service.wait_until_listening()
        until(lambda: [worker["state"] for worker in service.workers()] == ["failed", "ready"])
        assert "given up" in service.workers()[0]["reason"]
        assert service.predict({"n": 3})[0]["twice"] == 6


def lost_on_demand(devices: Devices, folder: Path) -> Path:
    """Return the file that is to name the lost device."""
    if not devices.is_simulated:
        pytest.skip("a GPU cannot be lost on demand")
    return folder / "lost"


def two_devices(devices: Devices, lost: Path, **model: object) -> dict[str, dict[str, object]]:
    options = {"lost": str(lost)}
    names = devices.named(0, 1)
    return faulty(source=MODEL, devices=names, replicas=2, options=options, **model)
