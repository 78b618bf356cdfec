"""Services without a worker: for a moment, for good, and for one model of several."""

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.load import Tally, after, ask_until
from tests.e2e.running import Running, running, until

pytestmark = pytest.mark.measures

FAULTY = "tests.fault_model:FaultModel"
BODY = {"instances": [{"n": 21}]}


def statuses(service: Running) -> tuple[int, int]:
    """Of /health/live and /health/ready."""
    live, ready = (httpx.get(f"{service.url}/health/{each}") for each in ("live", "ready"))
    return live.status_code, ready.status_code


def test_without_any_worker_it_is_alive_not_ready_and_says_when_to_come_back(tmp_path: Path):
    config, gate = tmp_path / "inferpool.toml", tmp_path / "gate"
    config.write_text(
        f"""
        [models.m]
        source = "{FAULTY}"
        replicas = 2
        options = {{ load_s = 1.5, gate = "{gate}" }}
        """
    )
    with running("--config", str(config)) as service:
        gate.touch()
        for pid in service.worker_pids():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not service.worker_pids())
        took_ms = []
        for _ in range(5):
            refused = httpx.post(f"{service.url}/predict", json=BODY)
            assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
            assert refused.json()["retryable"]
            assert int(refused.headers["retry-after"]) >= 2
            took_ms.append(float(refused.headers["server-timing"].rpartition("dur=")[2]))
        assert min(took_ms) < 50
        assert statuses(service) == (200, 503)
        gate.unlink()
        until(lambda: statuses(service) == (200, 200))
        again = httpx.post(f"{service.url}/predict", json=BODY)
        assert again.json()["predictions"][0]["twice"] == 42


def test_model_that_crashes_in_a_loop_leaves_its_neighbour_alone_and_is_given_up(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        f"""
        [models.good]
        source = "{FAULTY}"
        replicas = 1
        [models.bad]
        source = "{FAULTY}"
        replicas = 1
        max_restarts = 2
        options = {{ load = "exit" }}
        """
    )

    async def load(service: Running) -> Tally:
        is_late = after(2)
        return await ask_until(
            service.url, lambda tally: tally.right > 100 and is_late(tally), num_clients=4
        )

    with running("--config", str(config), ready=False) as service:
        service.url = str(service.wait_for_log(" at http://")["message"]).rpartition(" at ")[2]
        tally = asyncio.run(load(service))
        assert (tally.wrong, tally.unanswered) == ([], [])

        def bad() -> httpx.Response:
            return httpx.post(f"{service.url}/predict/bad", json=BODY)

        until(lambda: bad().json()["code"] == "given_up")
        refused = bad()
        assert refused.status_code == 503
        assert not refused.json()["retryable"]
        assert "retry-after" not in refused.headers
        assert statuses(service) == (200, 200)
        model = next(
            each
            for each in httpx.get(f"{service.url}/health").json()["models"]
            if each["name"] == "bad"
        )
        assert model["workers"][0]["restarts"] == 2


def test_books_balance_at_every_scrape_while_workers_die(tmp_path: Path):
    def do(n: int) -> str:
        return "raise" if n % 10 == 3 else "sleep" if n % 50 == 7 else "ok"

    outcomes = ("succeeded", "failed", "expired", "cancelled")

    async def go(service: Running) -> list[dict[str, float]]:
        has_lasted, is_late = after(3), after(60)
        pages: list[dict[str, float]] = []

        def is_over(tally: Tally) -> bool:
            has_all = len(pages) > 20 and all(pages[-1][name] for name in outcomes)
            return is_late(tally) or (has_lasted(tally) and has_all)

        load = asyncio.ensure_future(ask_until(service.url, is_over, do=do))
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            impatient = asyncio.ensure_future(hang_up(client, is_over))
            while not load.done():
                pages.append(books((await client.get("/metrics")).text))
                if len(pages) % 25 == 5:
                    for pid in (await asyncio.to_thread(service.worker_pids))[:1]:
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
            await impatient
        tally = await load
        assert tally.unanswered == []
        assert {status for _, status, _ in tally.wrong} == {500}
        return pages

    async def hang_up(client: httpx.AsyncClient, is_over) -> None:
        while not is_over(Tally()):
            for timeout_ms, patience_s in (("100", 5.0), ("5000", 0.05)):
                body = {"instances": [{"n": 1, "do": "sleep"}]}
                headers = {"X-Timeout-Ms": timeout_ms}
                try:
                    await client.post("/predict", json=body, headers=headers, timeout=patience_s)
                except httpx.TimeoutException:
                    continue

    with running(FAULTY, "--replicas", "2") as service:
        pages = asyncio.run(go(service))
        for page in pages:
            ended = sum(page[name] for name in outcomes)
            assert page["accepted"] == ended + page["in flight"], page
        assert len(pages) > 20
        assert all(pages[-1][name] for name in outcomes)
        until(lambda: books(httpx.get(f"{service.url}/metrics").text)["in flight"] == 0)
        # What a worker may still read is given back when its batch is over, not its request.
        empty = "inferpool_arena_used_bytes 0.0"
        until(lambda: empty in httpx.get(f"{service.url}/metrics").text)


def books(text: str) -> dict[str, float]:
    """The ledger as /metrics shows it."""
    found = {
        name: float(value)
        for name, value in re.findall(r'inferpool_instances_total\{.*outcome="(\w+)"\} (\S+)', text)
    }
    (in_flight,) = re.findall(r"inferpool_instances_in_flight\{.*\} (\S+)", text)
    return {**found, "in flight": float(in_flight)}
