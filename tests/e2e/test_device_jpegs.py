"""A service whose simulated device decodes the JPEGs."""

from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.device_jpegs_model import FILL, LOSE, marked
from tests.e2e.running import Running, faulty, running, until
from tests.models.items import encoded, image_item, loaded, photo, run
from tests.small_classifier import SmallClassifier

pytestmark = pytest.mark.simulated

JPEG = {"Content-Type": "image/jpeg"}
NAMES = ("astronaut", "coffee", "chelsea", "rocket")
DATAS = [encoded(photo(name)) for name in NAMES]
HOLLOW = DATAS[0][: DATAS[0].index(b"\xff\xda")] + b"\xff\xd9"
"""A JPEG with all of its headers, and no pixels."""


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    settings = faulty(
        source="tests.device_jpegs_model:DeviceJpegs",
        devices="sim:0",
        decode="fast",
        max_batch_size=8,
    )
    # Streams that lag show what is read before it is written, and the other way about.
    with running(settings=settings, env={"SIM_DELAY_US": "200"}) as service:
        yield service


@pytest.fixture(scope="module")
def exact() -> list[list[float]]:
    scores = run(loaded(SmallClassifier()), [image_item(data) for data in DATAS])["probabilities"]
    return scores.tolist()


def inline(data: bytes) -> dict[str, str]:
    return {"b64": b64encode(data).decode()}


def is_close(labels: list[dict[str, Any]], scores: list[float]) -> bool:
    found = {each["index"]: each["score"] for each in labels}
    return all(abs(scores[index] - score) < 0.01 for index, score in found.items())


@pytest.mark.slow
def test_the_device_decodes_and_the_service_says_so(service: Running):
    assert [worker["decode"] for worker in service.workers()] == ["device"]


@pytest.mark.slow
def test_many_photographs_at_once_score_as_exact_decoding_does(service: Running, exact):
    def ask(n: int) -> bool:
        answer = service.post(content=DATAS[n % 4], headers=JPEG)
        assert answer.status_code == 200, answer.text
        return is_close(answer.json()["predictions"][0], exact[n % 4])

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(ask, range(240)))


def test_a_damaged_jpeg_fails_alone(service: Running, exact):
    datas = [DATAS[0], DATAS[1], HOLLOW, DATAS[3]]
    answers = service.predict(*map(inline, datas))
    assert answers[2]["error"]["code"] == "invalid_input"
    assert "cannot be decoded" in answers[2]["error"]["message"]
    assert all(is_close(answers[i], exact[i]) for i in (0, 1, 3))


def test_jpegs_for_which_there_is_no_room_are_decoded_in_halves(service: Running, exact):
    pids = service.worker_pids()
    datas = [marked(FILL, photo(name)) for name in NAMES] * 2
    answers = service.predict(*map(inline, datas))
    assert all(map(is_close, answers, exact * 2))
    assert service.worker_pids() == pids
    service.wait_for_log("inputs of this shape at once")


@pytest.mark.slow
def test_a_device_lost_while_it_decodes_ends_the_worker(service: Running, exact):
    (pid,) = service.worker_pids()
    service.post(content=marked(LOSE, photo("coffee")), headers=JPEG)
    service.wait_for_log("ended: the device's context is lost")
    until(lambda: service.worker_pids() not in ([], [pid]))
    answer = service.post(content=DATAS[0], headers=JPEG)
    assert answer.status_code == 200, answer.text
    assert is_close(answer.json()["predictions"][0], exact[0])
