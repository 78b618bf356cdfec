"""Photographs decoded in processes beside the workers, over HTTP."""

import base64
import functools
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.running import Running, is_alive, running, until
from tests.models.items import jpeg

NAMES = ("chelsea", "coffee", "astronaut", "rocket", "clock", "camera")
TEXTS = [{"b64": base64.b64encode(jpeg(name)).decode()} for name in NAMES]
APART = "tests.apart_model:ApartModel"


def ask_all(service: Running) -> list[object]:
    """Return the answers to photographs as bodies, in base64, cut short, and with a parameter.

    In batches of one, since the size of a batch changes the last digits.
    """
    images = [jpeg(name) for name in NAMES]

    def post(image: bytes, path: str = "/predict") -> tuple[int, object]:
        answer = service.post(path, content=image, headers={"Content-Type": "image/jpeg"})
        return answer.status_code, answer.json().get("predictions", answer.json().get("detail"))

    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(post, images * 2))
    cut = {"b64": base64.b64encode(jpeg("coffee")[:99]).decode()}
    mixed = service.ask(*TEXTS[:2], cut, *TEXTS[:2], {"b64": "no base64"}, TEXTS[0])
    found: list[object] = [*whole, service.predict(*TEXTS), mixed.status_code, told(mixed)]
    found += [post(image[: len(image) // 2]) for image in images]
    found += [post(images[0], f"/predict?top_k={top_k}") for top_k in (1, 3, 0)]
    return found


def told(answer: httpx.Response) -> dict[str, object]:
    """Return what a JSON answer says, without what names the request."""
    return {k: v for k, v in answer.json().items() if k not in ("instance", "request_id")}


def one_worker(source: str, **changes: object) -> dict[str, object]:
    return {"models": {"m": {"source": source, "replicas": 1, **changes}}}


def decoders(service: Running) -> list[dict]:
    return [decoder for worker in service.workers() for decoder in worker["decoders"]]


def pids(service: Running) -> Sequence[int]:
    return [decoder["pid"] for decoder in decoders(service)]


def warm(service: Running, num: int) -> None:
    """Ask until all decoders have prepared something."""

    def all_have_worked() -> bool:
        service.predict(*TEXTS)
        found = decoders(service)
        return len(found) == num and all(each["num_decoded"] for each in found)

    until(all_have_worked)


@pytest.fixture(scope="module")
def plain():
    with running(
        settings=one_worker("efficientnet_lite0", decoders=0, max_batch_size=1)
    ) as service:
        assert decoders(service) == []
        yield service


@pytest.fixture(scope="module")
def decoded():
    with running(
        settings=one_worker("efficientnet_lite0", decoders=2, max_batch_size=1)
    ) as service:
        warm(service, 2)
        yield service


def test_killed_and_stopped_decoders_cost_nobody_an_answer(plain: Running, decoded: Running):
    expected = ask_all(plain)
    before = pids(decoded)
    os.kill(before[0], signal.SIGKILL)
    os.kill(before[1], signal.SIGSTOP)
    assert ask_all(decoded) == expected
    until(lambda: len(pids(decoded)) == 2 and not {*pids(decoded)} & {*before})
    (worker,) = decoded.workers()
    assert worker["incarnation"] == worker["restarts"] == 0
    assert ask_all(decoded) == expected


def test_poison_costs_only_its_own_request_an_answer_and_is_quarantined():
    with running(settings=one_worker(APART, decoders=1)) as service:
        until(lambda: service.predict({"n": 2})[0]["by"] in pids(service))
        poison = {"do": "kill early"}
        for n in (1, 3, 4):
            answer = service.ask({**poison, "n": n})
            assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
            answer = service.ask({**poison, "n": n})
            assert (answer.status_code, answer.json()["code"]) == (422, "quarantined")
            assert service.predict({"n": 2})[0]["twice"] == 4
        until(lambda: service.predict({"n": 2})[0]["by"] in pids(service))
        (worker,) = service.workers()
        assert worker["incarnation"] == 0
        assert decoders(service)[0]["restarts"] == 6


def ask_slowly(service: Running, num: int) -> list[Future[httpx.Response]]:
    """Ask of a model that prepares slowly, and return once decoders work on that.

    All calls have come by then: a service that stops takes no more of them.
    """
    accepted = 'instances_total{model="m",outcome="accepted"}'
    before = sum(each["num_decoded"] for each in decoders(service))
    num_before = service.metric(accepted)
    with_results = ThreadPoolExecutor(num)
    futures = [with_results.submit(service.ask, {"n": n}) for n in range(1, num + 1)]
    with_results.shutdown(wait=False)
    until(lambda: sum(each["num_decoded"] for each in decoders(service)) > before)
    until(lambda: service.metric(accepted) == num_before + num)
    return futures


def test_all_that_decoders_hold_is_answered_before_the_service_ends():
    settings = one_worker(APART, decoders=2, max_batch_size=4, options={"prepare_s": 0.2})
    with running(settings=settings) as service:
        until(lambda: service.predict({"n": 1})[0]["by"] in pids(service))
        futures = ask_slowly(service, 12)
        family = service.family()
        for process in family:  # as a stop of the control group does
            process.send_signal(signal.SIGTERM)
        answers = [future.result() for future in futures]
        assert [answer.status_code for answer in answers] == [200] * 12
        found = [answer.json()["predictions"][0]["twice"] for answer in answers]
        assert found == [2 * n for n in range(1, 13)]
        assert service.wait() == 0
        until(lambda: not any(map(is_alive, family)))
        assert not [line for line in service.log if line["level"] in ("warning", "error")]


@pytest.mark.slow
def test_a_split_replica_has_decoders_that_end_with_it(plain: Running):
    settings = one_worker(
        "efficientnet_lite0", decoders=2, placement="pipeline", devices_per_replica=2
    )
    labels = [row[0]["label"] for row in plain.predict(*TEXTS)]
    with running(settings=settings) as service:
        warm(service, 2)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: service.predict(*TEXTS), range(4)))
        assert [[row[0]["label"] for row in answer] for answer in answers] == [labels] * 4
        before = pids(service)
        (worker,) = service.workers()
        assert len(worker["ranks"]) == 2
        os.kill(worker["ranks"][1]["pid"], signal.SIGKILL)
        assert [row[0]["label"] for row in service.predict(*TEXTS)] == labels
        warm(service, 2)
        assert not {*before} & {*pids(service)}


def test_decoders_end_with_a_service_that_is_killed():
    settings = {"models": {"m": {"source": APART, "replicas": 2, "decoders": 2}}}
    with running(settings=settings) as service:
        until(lambda: len(pids(service)) == 4)
        family = service.family()
        service.signal(signal.SIGKILL)
        service.wait()
        until(lambda: not any(map(is_alive, family)))


@pytest.mark.slow
@pytest.mark.simulated
def test_answers_on_an_accelerator_are_the_same_as_without():
    models = {
        name: {"source": "efficientnet_lite0", "decoders": num, "devices": "sim:0"}
        for name, num in (("decoded", 2), ("plain", 0))
    }
    found = []
    with running(settings={"models": models, "default_model": "decoded"}) as service:
        warm(service, 2)
        for name in models:
            ask = functools.partial(service.predict, *TEXTS[:3], path=f"/predict/{name}")
            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(ask) for _ in range(2)]
            answers = [future.result() for future in futures]
            labels = [[(row[0]["label"], round(row[0]["score"], 3)) for row in a] for a in answers]
            found.append(labels)
        assert not any("cannot be pinned" in str(line) for line in service.log)
    assert found[0] == found[1]
