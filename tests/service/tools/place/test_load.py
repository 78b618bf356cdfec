import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inferpool.service.telemetry.metrics import Metrics, Reading
from inferpool.service.tools.place.load import FrontLoad, LoadError, counts_in
from tests.ports import free_port


class Pages:
    """Answers of a front end, which a test changes."""

    def __init__(self) -> None:
        self.metrics = Metrics(["a", "b"], {"version": "0"})
        self.depth = 0
        self.health = b'{"hosts": [{"name": "x", "address": "y"}, {"name": "z"}]}'
        self.status = 200
        self.key = ""
        self.metrics.gauge_source(
            lambda: [
                Reading(name="queue_depth", value=self.depth, labels=("a",)),
                Reading(name="max_queue_length", value=100, labels=("a",)),
                Reading(name="worker_up", value=1, labels=("a", "a/0", "cpu")),
                Reading(name="worker_up", value=1, labels=("a", "a/1", "cpu")),
            ]
        )

    def text(self) -> str:
        return self.metrics.render()[0].decode()


@contextmanager
def served(pages: Pages) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages.key = self.headers.get("Authorization", "")
            is_metrics = self.path == "/metrics"
            self.send_response(pages.status if is_metrics else 503)
            self.end_headers()
            self.wfile.write(pages.text().encode() if is_metrics else pages.health)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def load(pages: Pages, objective_s: float = 0.0) -> Iterator[FrontLoad]:
    with served(pages) as url:
        one = FrontLoad(url, "key", ssl.create_default_context(), objective_s)
        try:
            yield one
        finally:
            one.close()


def test_the_load_is_what_came_between_two_looks_and_what_waits_now():
    pages = Pages()
    model = pages.metrics.model("a")
    model.accepted = 50
    with load(pages, objective_s=0.1) as one:
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


def test_a_new_start_of_the_front_end_tells_no_load():
    pages = Pages()
    pages.metrics.model("a").accepted = 50
    with load(pages) as one:
        one.read(0.0)
        pages.metrics.model("a").accepted = 5
        assert one.read(5.0) is None
        pages.metrics.model("a").accepted = 10
        demand = one.read(10.0)
    assert demand is not None
    assert demand.offered_per_s == 1.0


def test_few_calls_have_no_percentile():
    pages = Pages()
    with load(pages, objective_s=0.01) as one:
        one.read(0.0)
        pages.metrics.model("a").answer_duration.observe(9.0)
        demand = one.read(5.0)
    assert demand is not None
    assert demand.p99_ratio == 0.0


def test_what_tells_nothing_says_why():
    pages = Pages()
    with load(pages) as one:
        pages.status = 401
        with pytest.raises(LoadError, match="INFERPOOL_METRICS_KEYS"):
            one.read(0.0)
        pages.status = 500
        with pytest.raises(LoadError, match="answers with 500"):
            one.read(0.0)
        pages.status, pages.health = 200, b"[]"
        with pytest.raises(LoadError, match="/health cannot be read"):
            one.read(0.0)
    nobody = FrontLoad(
        f"http://127.0.0.1:{free_port()}", "", ssl.create_default_context(), objective_s=0.0
    )
    with pytest.raises(LoadError, match="--front-end"):
        nobody.read(0.0)
    nobody.close()
    with pytest.raises(LoadError, match="/metrics cannot be read"):
        counts_in("inferpool_queue_depth{ 1")
