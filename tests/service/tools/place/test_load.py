import ssl

import httpx
import pytest

from inferpool.service.telemetry.metrics import Metrics, Reading
from inferpool.service.tools.place.load import FrontLoad, LoadError, counts_in


class Pages:
    """Answers of a front end, which a test changes."""

    def __init__(self) -> None:
        self.metrics = Metrics(["a", "b"], {"version": "0"})
        self.model = self.metrics.model("a")
        self.depth = 0
        self.health = b'{"models": [], "hosts": [{"name": "x", "address": "y"}, {"name": "z"}]}'
        self.status = 200
        self.key = ""
        self.is_there = True
        self.metrics.gauge_source(
            lambda: [
                Reading(name="queue_depth", value=self.depth, labels=("a",)),
                Reading(name="max_queue_length", value=100, labels=("a",)),
                Reading(name="worker_up", value=1, labels=("a", "a/0", "cpu")),
                Reading(name="worker_up", value=1, labels=("a", "a/1", "cpu")),
            ]
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not self.is_there:
            raise httpx.ConnectError("refused")
        self.key = request.headers.get("Authorization", "")
        if request.url.path == "/health":
            return httpx.Response(503, content=self.health)
        return httpx.Response(self.status, content=self.metrics.render()[0])

    def load(self, objective_s: float = 0.0) -> FrontLoad:
        transport = httpx.MockTransport(self.answer)
        return FrontLoad(
            "http://front", "key", ssl.create_default_context(), objective_s, transport
        )


def test_the_load_is_what_came_between_two_looks_and_what_waits_now():
    pages = Pages()
    model = pages.model
    model.accepted = 50
    one = pages.load(objective_s=0.1)
    assert one.read(0.0) is None
    assert pages.key == "Bearer key"
    model.accepted += 80
    model.rejected["queue_full"] += 15
    model.rejected["objective"] += 5
    model.rejected["quarantined"] += 1000  # no host more would mend that
    model.inference_duration.observe(6.0)
    model.prepare_duration.observe(2.0)
    for _ in range(100):
        model.answer_duration.observe(0.2)
    pages.depth = 30
    demand = one.read(10.0)
    assert demand is not None
    assert (demand.num_hosts, demand.offered_per_s, demand.refused_per_s) == (2, 10.0, 2.0)
    assert demand.busy == pytest.approx(6 / 20)
    assert demand.queue_share == 0.3
    assert 1.0 < demand.p99_ratio <= 2.5


def test_a_new_start_of_the_front_end_tells_no_load_and_few_calls_have_no_percentile():
    pages = Pages()
    pages.model.accepted = 50
    one = pages.load(objective_s=0.01)
    one.read(0.0)
    pages.model.accepted = 5
    assert one.read(5.0) is None
    pages.model.accepted = 10
    pages.model.answer_duration.observe(9.0)
    demand = one.read(10.0)
    assert demand is not None
    assert (demand.offered_per_s, demand.p99_ratio) == (1.0, 0.0)


def test_what_tells_nothing_says_why():
    pages = Pages()
    one = pages.load()
    for change, said in (
        ({"status": 401}, "INFERPOOL_METRICS_KEYS"),
        ({"status": 500}, "answers with 500"),
        ({"status": 200, "health": b"[]"}, "/health cannot be read"),
        ({"is_there": False}, "--front-end"),
    ):
        vars(pages).update(change)
        with pytest.raises(LoadError, match=said):
            one.read(0.0)
    with pytest.raises(LoadError, match="/metrics cannot be read"):
        counts_in("inferpool_queue_depth{ 1")
