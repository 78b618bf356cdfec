"""Two front ends of which one serves: the other takes over when it is killed or stands still."""

import contextlib
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.hosts import KEYS, agent_at
from tests.e2e.running import Running, faulty, running, status_of, until
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.measures, pytest.mark.timeout(300)]

START_S = 90.0


@contextlib.contextmanager
def front_end(port: int, other: int) -> Iterator[Running]:
    """Start a front end that takes over from another one."""
    http_port = free_port()
    arguments = ["--cluster-port", str(port), "--standby-of", f"127.0.0.1:{other}"]
    with running(*arguments, settings=faulty(), env=KEYS, port=http_port, ready=False) as service:
        service.url = f"http://127.0.0.1:{http_port}"
        yield service


def is_ready(service: Running) -> bool:
    return status_of(f"{service.url}/health/ready") == 200


def is_standing_by(service: Running) -> bool:
    try:
        return bool(service.get("/health").json()["standby"])
    except httpx.TransportError:
        return False


@pytest.mark.measures
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_front_end_answers_within_five_seconds_and_loads_nothing(
    signum: signal.Signals,
):
    ports = free_port(), free_port()
    join = ",".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(front_end(*ports))
        stack.enter_context(agent_at(join, "a"))
        until(lambda: is_ready(serving), START_S)
        other = stack.enter_context(front_end(*reversed(ports)))
        until(lambda: is_standing_by(other), START_S)
        other.wait_for_log("connected to the front end")
        refused = other.ask({"n": 21})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert other.get("/health/ready").status_code == 503
        assert other.get("/health/live").status_code == 200
        assert serving.predict({"n": 21})[0]["twice"] == 42
        (worker,) = serving.workers()

        began = time.monotonic()
        serving.signal(signum)
        until(lambda: other.ask({"n": 21}).status_code == 200)
        took_s = time.monotonic() - began
        assert [each["pid"] for each in other.workers()] == [worker["pid"]]
        assert took_s < 5
        print(f"taken over after {signum.name} in {took_s:.2f} s")  # noqa: T201  # for docs

        serving.signal(signal.SIGCONT)
        if signum == signal.SIGSTOP:
            until(lambda: is_standing_by(serving))
            assert other.predict({"n": 21})[0]["twice"] == 42
            assert serving.ask({"n": 21}).status_code == 503
