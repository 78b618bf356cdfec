"""Workers, front ends and whole services that die, hang or stop under load."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.load import Tally, after, ask_until, ask_until_stopped
from tests.e2e.running import FAULTY, ROOT, Running, faulty, left_over, running, until

pytestmark = pytest.mark.measures

OUTCOMES = ("succeeded", "failed", "expired", "cancelled")
JUMPING_CLOCK = """
import os, pathlib, time
pathlib.Path(os.environ["JUMPS"], str(os.getpid())).touch()
_time, _monotonic = time.time, time.monotonic

def jumping():
    return _time() + 86_400 * (int(_monotonic() * 2) % 3 - 1)

time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""
"""A wall clock that jumps by a day every half second, for every process that imports it."""


@pytest.fixture(scope="module")
def started() -> Iterator[Running]:
    with running(settings=faulty(replicas=2)) as service:
        yield service


@pytest.fixture
def service(started: Running) -> Running:
    """The shared service, once both of its workers are ready."""
    until(lambda: len(started.worker_pids()) == 2)
    return started


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Return what is in /dev/shm that was not before; other tests soon remove what is theirs."""
    deadline = time.monotonic() + 10
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def forkserver_pid(service: Running) -> int:
    return int(service.get("/health").json()["forkserver"]["pid"])


def statuses(service: Running) -> tuple[int, int]:
    """Return the status codes of /health/live and /health/ready."""
    live, ready = (service.get(f"/health/{each}") for each in ("live", "ready"))
    return live.status_code, ready.status_code


def load_during(service: Running, strike: Callable[[], None]) -> Tally:
    """Keep clients asking while `strike` runs, until more than 100 answers were right."""

    async def go() -> Tally:
        is_over = asyncio.Event()
        load = asyncio.ensure_future(
            ask_until(service.url, lambda tally: is_over.is_set() and tally.right > 100)
        )
        await asyncio.to_thread(strike)
        is_over.set()
        return await load

    return asyncio.run(go())


def test_killed_workers_cost_no_request_and_come_back(service: Running):
    restarts = 'worker_restarts_total{model="m",reason="signal"}'
    num_before = service.metric(restarts)

    def strike() -> None:
        for round in range(5):
            time.sleep(0.2)
            pids = service.worker_pids()
            os.kill(pids[round % len(pids)], signal.SIGKILL)
            until(lambda old=pids: set(service.worker_pids()) - set(old))

    tally = load_during(service, strike)
    assert (tally.wrong, tally.unanswered) == ([], [])
    assert service.metric(restarts) == num_before + 5


def test_killed_forkserver_costs_no_request_and_no_worker(service: Running):
    def strike() -> None:
        for _ in range(2):  # the second time while it imports torch
            pid = forkserver_pid(service)
            os.kill(pid, signal.SIGKILL)
            until(lambda old=pid: forkserver_pid(service) != old)

    pids = service.worker_pids()
    tally = load_during(service, strike)
    assert (tally.wrong, tally.unanswered) == ([], [])
    assert service.worker_pids() == pids


def test_poison_fails_alone_while_its_neighbours_succeed(service: Running):
    def do(n: int) -> str:
        return "kill" if n == 40 else "ok"

    tally = asyncio.run(ask_until(service.url, lambda tally: tally.right > 400, do=do))
    assert tally.unanswered == []
    assert [(n, status) for n, status, _ in tally.wrong] == [(40, 500)]
    assert tally.wrong[0][2]["code"] == "worker_crashed"


@pytest.mark.slow
def test_many_poisons_are_quarantined_and_the_service_goes_on(service: Running):
    rejected = 'rejected_total{model="m",reason="quarantined"}'
    quarantined = 'quarantined_inputs{model="m"}'
    before = service.metric(rejected), service.metric(quarantined)
    for n in range(6):
        answer = service.ask({"n": n, "do": "kill"})
        assert (answer.status_code, answer.json()["code"]) == (500, "worker_crashed")
        assert service.predict({"n": n})[0]["twice"] == 2 * n
    until(lambda: len(service.worker_pids()) == 2)
    pids = service.worker_pids()
    again = service.ask({"n": 3, "do": "kill"})
    assert (again.status_code, again.json()["code"]) == (422, "quarantined")
    first, second, third = service.predict({"n": 1}, {"n": 5, "do": "kill"}, {"n": 2})
    assert (first["twice"], second["error"]["code"], third["twice"]) == (2, "quarantined", 4)
    assert service.worker_pids() == pids
    after = service.metric(rejected), service.metric(quarantined)
    assert after == (before[0] + 2, before[1] + 6)


def test_failure_of_the_model_is_logged_with_the_id_of_its_request(service: Running):
    answer = service.ask({"n": 1, "do": "raise"}, headers={"X-Request-ID": "find-me"})
    assert (answer.status_code, answer.json()["code"]) == (500, "model_error")
    line = service.wait_for_log("forward failed on an input")
    assert line["request_id"] == "find-me"
    assert "ValueError: I was told to" in str(line["exception"])


def test_accepted_instances_balance_at_every_scrape_while_workers_die(service: Running):
    def do(n: int) -> str:
        return "raise" if n % 10 == 3 else "sleep" if n % 50 == 7 else "ok"

    async def go() -> list[dict[str, float]]:
        has_lasted, is_late = after(3), after(60)
        pages: list[dict[str, float]] = []
        first = instances(service.metrics())

        def is_over(tally: Tally) -> bool:
            has_all = len(pages) > 20 and all(pages[-1][each] > first[each] for each in OUTCOMES)
            return is_late(tally) or (has_lasted(tally) and has_all)

        load = asyncio.ensure_future(ask_until(service.url, is_over, do=do))
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            impatient = asyncio.ensure_future(hang_up(client, is_over))
            while not load.done():
                pages.append(instances((await client.get("/metrics")).text))
                if len(pages) % 25 == 5:
                    for pid in (await asyncio.to_thread(service.worker_pids))[:1]:
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
            await impatient
        tally = await load
        assert tally.unanswered == []
        assert {status for _, status, _ in tally.wrong} == {500}
        assert all(pages[-1][each] > first[each] for each in OUTCOMES)
        return pages

    async def hang_up(client: httpx.AsyncClient, is_over: Callable[[Tally], bool]) -> None:
        while not is_over(Tally()):
            for timeout_ms, patience_s in (("100", 5.0), ("5000", 0.05)):
                body = {"instances": [{"n": 1, "do": "sleep"}]}
                headers = {"X-Timeout-Ms": timeout_ms}
                try:
                    await client.post("/predict", json=body, headers=headers, timeout=patience_s)
                except httpx.TimeoutException:
                    continue

    for page in asyncio.run(go()):
        assert page["accepted"] == sum(page[each] for each in OUTCOMES) + page["in flight"], page
    until(lambda: service.metric('instances_in_flight{model="m"}') == 0)
    # A batch keeps its slots until it is over, which may be later than its requests are.
    until(lambda: service.metric("arena_used_bytes") == 0)


def instances(metrics: str) -> dict[str, float]:
    """Return how many instances had each outcome, and how many are in flight."""
    found = dict(re.findall(r'inferpool_instances_total\{.*outcome="(\w+)"\} (\S+)', metrics))
    (found["in flight"],) = re.findall(r"inferpool_instances_in_flight\{.*\} (\S+)", metrics)
    return {name: float(value) for name, value in found.items()}


@pytest.mark.alone
@pytest.mark.parametrize("fronts", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_sigterm_under_load_answers_all_that_was_accepted_and_leaves_nothing(
    tmp_path: Path, fronts: str
):
    before = shared_memory()
    options = {"gate": tmp_path / "gate", "calls": tmp_path / "calls"}
    kill = os.kill if fronts == "1" else os.killpg  # some supervisors signal the whole group

    def stop(service: Running) -> float:
        kill(service.process.pid, signal.SIGTERM)
        return time.monotonic()

    settings = faulty(replicas=2, options=options)
    with running("--front-ends", fronts, settings=settings) as service:
        family = service.family()
        tally = asyncio.run(ask_until_stopped(service.url, partial(stop, service), tmp_path))
        assert service.wait() == 0
        assert (tally.wrong, tally.unanswered) == ([], [])
        assert left_over(family) == []
    assert left_in_shared_memory(before) == set()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("act", "has_forkserver", "fronts"),
    [
        ("spin", True, "1"),
        ("spin", False, "1"),
        pytest.param("ok", True, "2", marks=pytest.mark.slow),
    ],
)
def test_sigkill_of_the_main_process_leaves_no_process_and_no_memory(
    act: str, has_forkserver: bool, fronts: str
):
    before = shared_memory()

    async def go(service: Running) -> None:
        def has_lost(tally: Tally) -> bool:
            return bool(tally.unanswered or tally.unconnected)

        load = asyncio.ensure_future(ask_until(service.url, has_lost, do=lambda n: act))
        begun = 'in_flight{model="m"} 16.0' if act == "spin" else '"succeeded"} [1-9]'
        await asyncio.to_thread(until, lambda: re.search(begun, service.metrics()))
        await asyncio.sleep(0.2)
        if not has_forkserver:
            os.kill(forkserver_pid(service), signal.SIGKILL)
        service.signal(signal.SIGKILL)
        await asyncio.wait_for(load, 60)

    with running("--front-ends", fronts, settings=faulty(replicas=2)) as service:
        family = service.family()
        assert len(family) >= 4
        asyncio.run(go(service))
        assert left_over(family) == []
    assert left_in_shared_memory(before) == set()


def test_second_signal_hurries():
    with running(settings=faulty()) as service, ThreadPoolExecutor() as pool:
        family = service.family()
        answer = pool.submit(service.ask, {"n": 1, "do": "hang"})
        until(lambda: service.metric('instances_in_flight{model="m"}') == 1)
        service.signal(signal.SIGINT)
        service.wait_for_log("stopping")
        time.sleep(0.4)  # a second signal right after the first one counts as the same
        assert service.process.poll() is None
        service.signal(signal.SIGINT)
        began = time.monotonic()
        assert answer.result(30).status_code == 503
        service.wait()
        assert time.monotonic() - began < 15  # a drain would wait longer for what is in flight
        assert left_over(family) == []
    assert [line for line in service.log if line["level"] not in ("info", "warning")] == []


def test_model_that_can_never_load_ends_the_service_and_its_reason_is_logged_once():
    with running(f"{FAULTY}X", "--replicas", "2", ready=False) as service:
        assert service.wait() == 3
        text = " ".join(str(line["message"]) for line in service.log)
        assert text.count("has no 'FaultModelX'") == 1
        assert {line["level"] for line in service.log} <= {"info", "error", "critical"}


@pytest.mark.slow
def test_without_any_worker_it_is_alive_not_ready_and_says_when_to_come_back(tmp_path: Path):
    gate = tmp_path / "gate"
    with running(settings=faulty(replicas=2, options={"load_s": 1.5, "gate": gate})) as service:
        gate.touch()
        for pid in service.worker_pids():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not service.worker_pids())
        took_ms = []
        for _ in range(5):
            refused = service.ask({"n": 21})
            assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
            assert refused.json()["retryable"]
            assert int(refused.headers["retry-after"]) >= 2
            took_ms.append(float(refused.headers["server-timing"].rpartition("dur=")[2]))
        assert min(took_ms) < 50
        assert statuses(service) == (200, 503)
        gate.unlink()
        until(lambda: statuses(service) == (200, 200))
        assert service.predict({"n": 21})[0]["twice"] == 42


@pytest.mark.slow
def test_model_that_crashes_in_a_loop_is_given_up_and_leaves_its_neighbour_alone():
    bad = {"source": FAULTY, "replicas": 1, "max_restarts": 2, "options": {"load": "exit"}}
    models = {"good": {"source": FAULTY, "replicas": 1}, "bad": bad}
    with running(settings={"models": models}, ready=False) as service:
        is_late = after(2)
        load = ask_until(
            service.wait_until_listening().url,
            lambda tally: tally.right > 100 and is_late(tally),
            num_clients=4,
        )
        tally = asyncio.run(load)
        assert (tally.wrong, tally.unanswered) == ([], [])

        def ask_bad() -> httpx.Response:
            return service.post("/predict/bad", json={"instances": [{"n": 21}]})

        until(lambda: ask_bad().json()["code"] == "given_up")
        refused = ask_bad()
        assert refused.status_code == 503
        assert not refused.json()["retryable"]
        assert "retry-after" not in refused.headers
        assert statuses(service) == (200, 200)
        assert [worker["restarts"] for worker in service.workers()] == [0, 2]


@pytest.mark.slow
def test_jumps_of_the_wall_clock_make_nothing_late_and_nothing_early(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    jumps, gate = tmp_path / "jumps", tmp_path / "gate"
    jumps.mkdir()
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JUMPS": str(jumps)}
    with running(settings=faulty(replicas=2, options={"gate": gate}), env=env) as service:
        is_late = after(1.6)
        tally = asyncio.run(
            ask_until(service.url, lambda tally: tally.right > 20 and is_late(tally))
        )
        assert (tally.wrong, tally.unanswered) == ([], [])
        for _ in range(3):
            gate.touch()
            late = service.ask({"n": 1, "do": "wait"}, headers={"X-Timeout-Ms": "100"})
            gate.unlink()
            assert late.status_code == 504
            total_ms = float(late.headers["server-timing"].rpartition("total;dur=")[2])
            assert 99 <= total_ms < 5000  # a jump of the clock would show as much more
        assert service.get("/health/ready").status_code == 200
        assert service.metric('worker_restarts_total{model="m",reason="hang"}') == 0
        # The forkserver has the clock too, and workers are forked from it.
        patched = {int(path.name) for path in jumps.iterdir()}
        assert len(patched & {process.pid for process in service.family()}) >= 2
