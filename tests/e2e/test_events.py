"""The live feed of a real service."""

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.running import running

OCTETS = {"Content-Type": "application/octet-stream"}


def states(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.measures
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_the_feed_tells_of_load_and_deaths_and_ends_when_the_service_does(num_fronts):
    options = ("--replicas", "1", "--front-ends", str(num_fronts))
    with running("echo", *options) as service:
        with httpx.stream("GET", f"{service.url}/events", timeout=60) as feed:
            seen = states(feed)
            assert next(seen)["models"]["echo"]["endings"] == []
            assert httpx.post(f"{service.url}/predict", content=b"x", headers=OCTETS).is_success
            os.kill(service.worker_pids()[0], signal.SIGKILL)
            samples = (state["models"]["echo"] for state in seen)
            answered = 0.0
            for sample in samples:
                answered += sample["requests_per_s"]
                if answered and sample["endings"]:
                    break
            assert sample["endings"][0]["cause"] == "signal"
            assert "SIGKILL" in sample["endings"][0]["reason"]
            service.signal(signal.SIGTERM)
            began = time.monotonic()
            *_, last = seen
            assert last["health"]["status"] == "draining"
            assert time.monotonic() - began < 15  # a call that is not over holds it up for longer
        assert service.wait() == 0
