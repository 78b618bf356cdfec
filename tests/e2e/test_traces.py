"""Traces of a real service as a collector receives them, with one front end and with two."""

import contextlib
import itertools
import re
import signal
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.collector import FakeCollector, attributes, collecting
from tests.e2e.running import Running, faulty, running, until

CANCELLED = 'instances_total{model="m",outcome="cancelled"}'
CALLER = "00f067aa0ba902b7"
SHORT = {"x-timeout-ms": "500"}
"""Time in which a worker gets the call, even on a busy machine."""
CALLS = {
    "succeeds": ("POST", "/predict/m", [{"n": 1}], {}),
    "by asgi": ("POST", "/%70redict", [{"n": 1}], {}),
    "fails": ("POST", "/predict", [{"n": 1, "do": "raise"}], {}),
    "does not fit": ("POST", "/predict", [7], {}),
    "comes late": ("POST", "/predict", [{"n": 1, "do": "wait"}], SHORT),
    "is given up": ("POST", "/predict/m", [{"n": 1, "do": "wait"}] * 3, {}),
    "many": ("POST", "/predict", [{"n": n} for n in range(20)], {}),
    "some fail": ("POST", "/predict", [{"n": 1}, {"n": 2, "do": "raise"}], {}),
    "no model": ("POST", "/predict/none", [1], {}),
    "health": ("GET", "/health", None, {}),
    "nothing": ("GET", "/nothing", None, {}),
    "not sampled": ("POST", "/predict", [{"n": 1}], {}),
    "loses its worker": ("POST", "/predict", [{"n": 4, "do": "kill"}], {}),
}


class TracedService:
    """A service, and what came of all the calls that were made of it."""

    def __init__(self, service: Running, collector: FakeCollector, gate: Path) -> None:
        self.service = service
        self.gate = gate
        self.collector = collector
        self.answers: dict[str, httpx.Response] = {}
        self.metrics = ""
        """Metrics after all calls, in the format of OpenMetrics."""

    def trace_id(self, name: str) -> str:
        return f"{list(CALLS).index(name) + 1:032x}"

    def spans(self, name: str) -> list[Span]:
        return self.collector.of_trace(self.trace_id(name))

    def root(self, name: str) -> Span:
        (root,) = (each for each in self.spans(name) if each.kind == Span.SPAN_KIND_SERVER)
        return root

    def ask_all(self) -> None:
        for name in CALLS:
            if name == "comes late":
                self.gate.touch()
            self.ask(name)
            if name == "is given up":
                until(lambda: self.service.metric(CANCELLED) == 3)
                self.gate.unlink()

    def ask(self, name: str) -> None:
        method, path, instances, headers = CALLS[name]
        flags = "00" if name == "not sampled" else "01"
        headers = {
            **headers,
            "traceparent": f"00-{self.trace_id(name)}-{CALLER}-{flags}",
            "tracestate": "vendor=1",
        }
        body = {} if instances is None else {"json": {"instances": instances}}
        timeout = 0.3 if name == "is given up" else 60
        with contextlib.suppress(httpx.ReadTimeout):
            self.answers[name] = self.service.http.request(
                method, self.service.url + path, headers=headers, timeout=timeout, **body
            )


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> dict[int, TracedService]:
    """Services with one front end and with two, stopped after all calls: every span has come."""
    found = {}
    with contextlib.ExitStack() as stack:
        for num_fronts in (1, 2):
            folder = tmp_path_factory.mktemp("traces")
            options = {"once": folder / "once", "gate": folder / "gate"}
            collector = stack.enter_context(collecting())
            env = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_EXPORTER_OTLP_HEADERS": "x-key=se%20cret",
                "OTEL_SERVICE_NAME": "pictures",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
                "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            }
            settings = faulty(options=options) | {"front_ends": num_fronts}
            service = stack.enter_context(running(settings=settings, env=env, ready=False))
            found[num_fronts] = TracedService(service, collector, folder / "gate")
        for traced in found.values():
            traced.service.wait_until_ready()
            traced.ask_all()
            accept = {"accept": "application/openmetrics-text"}
            traced.metrics = traced.service.get("/metrics", headers=accept).text
            traced.service.signal(signal.SIGTERM)
        assert [traced.service.wait() for traced in found.values()] == [0, 0]
    return found


@pytest.fixture(params=[1, 2])
def traced(request: pytest.FixtureRequest, services: dict[int, TracedService]) -> TracedService:
    return services[request.param]


def below(spans: list[Span], parent: Span) -> dict[str, Span]:
    """Return the spans right under one, by name, in order."""
    return {span.name: span for span in spans if span.parent_span_id == parent.span_id}


def about(span: Span) -> dict[str, str | int]:
    return attributes(iter(span.attributes))


def length_ms(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6


@pytest.mark.parametrize("name", ["succeeds", "by asgi"])
def test_a_call_is_a_span_of_its_callers_trace_with_its_steps_below(
    traced: TracedService, name: str
):
    root, spans, answer = traced.root(name), traced.spans(name), traced.answers[name]
    assert answer.status_code == 200
    assert answer.headers["traceparent"] == f"00-{traced.trace_id(name)}-{root.span_id.hex()}-01"
    assert (root.parent_span_id.hex(), root.trace_state) == (CALLER, "vendor=1")
    steps = below(spans, root)
    assert list(steps) == ["receive", "queue", "prepare", "compute", "answer"]
    assert len(spans) == 6
    for earlier, later in itertools.pairwise(steps.values()):
        assert root.start_time_unix_nano <= earlier.start_time_unix_nano
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano + 1000  # rounding
        assert later.end_time_unix_nano <= root.end_time_unix_nano
    timing = dict(each.split(";dur=") for each in answer.headers["server-timing"].split(", "))
    assert length_ms(steps["compute"]) == pytest.approx(float(timing["inference"]), abs=0.02)
    assert length_ms(steps["prepare"]) == pytest.approx(float(timing["preprocess"]), abs=0.02)
    assert about(steps["compute"]) == {
        "inferpool.try": 1,
        "inferpool.worker": "m/0",
        "inferpool.incarnation": 0,
        "inferpool.device": "cpu",
        "inferpool.batch_size": 1,
    }


def test_the_span_of_a_call_follows_the_conventions_for_http(traced: TracedService):
    root = traced.root("succeeds")
    url = httpx.URL(traced.service.url)
    found = about(root)
    assert found.pop("user_agent.original").startswith("python-httpx")
    assert found.pop("inferpool.request_id") == traced.answers["succeeds"].headers["x-request-id"]
    assert root.name == "POST /predict/{model}"
    assert found == {
        "http.request.method": "POST",
        "http.route": "/predict/{model}",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/predict/m",
        "server.address": url.host,
        "server.port": url.port,
        "inferpool.outcome": "succeeded",
        "inferpool.model": "m",
        "inferpool.priority": 5,
        "inferpool.model_version": 1,
        "inferpool.num_instances": 1,
        "inferpool.timeout_ms": 30_000,
    }
    resource = traced.collector.resources[0]
    assert resource["service.name"] == "pictures"
    assert resource["deployment.environment.name"] == "test"
    assert traced.collector.headers["x-key"] == "se cret"


@pytest.mark.parametrize(
    ("name", "status", "code", "step", "is_error"),
    [
        ("fails", 500, "model_error", "compute", True),
        ("does not fit", 422, "invalid_input", "prepare", False),
        ("comes late", 504, "deadline_exceeded", "attempt", True),
        ("no model", 404, "unknown_model", None, False),
    ],
)
def test_the_span_of_a_failed_call_shows_where_and_why(
    traced: TracedService, name: str, status: int, code: str, step: str | None, is_error: bool
):
    assert traced.answers[name].status_code == status
    root = traced.root(name)
    found = about(root)
    assert (found["http.response.status_code"], found["error.type"]) == (status, code)
    assert (root.status.code == Status.STATUS_CODE_ERROR) == is_error  # 4xx is the client's
    failed = [each for each in traced.spans(name)[1:] if each.status.code]
    assert [(each.name, about(each)["error.type"]) for each in failed] == (
        [(step, code)] if step else []
    )


def test_a_retried_instance_shows_each_try(traced: TracedService):
    assert traced.answers["loses its worker"].status_code == 200
    root, spans = traced.root("loses its worker"), traced.spans("loses its worker")
    names = [span.name for span in spans]
    assert names[1:] == ["receive", "queue", "attempt", "queue", "prepare", "compute", "answer"]
    assert about(root)["inferpool.num_retries"] == 1
    attempt, compute = spans[3], spans[6]
    assert (about(attempt)["error.type"], about(attempt)["inferpool.incarnation"]) == (
        "worker_lost",
        0,
    )
    assert (about(compute)["inferpool.try"], about(compute)["inferpool.incarnation"]) == (2, 1)
    assert [event.name for event in root.events] == ["worker lost"]


def test_a_call_that_is_given_up_shows_how_far_it_came(traced: TracedService):
    root, spans = traced.root("is given up"), traced.spans("is given up")
    assert about(root)["inferpool.outcome"] == "cancelled"
    assert [event.name for event in root.events] == ["client hung up"]
    instances = [each for each in spans if each.name == "instance"]
    assert [about(each)["inferpool.outcome"] for each in instances] == ["cancelled"] * 3
    assert all("queue" in below(spans, each) for each in instances)


def test_of_many_instances_the_first_have_spans(traced: TracedService):
    root, spans = traced.root("many"), traced.spans("many")
    instances = [each for each in spans if each.name == "instance"]
    assert [about(each)["inferpool.instance"] for each in instances] == list(range(16))
    assert about(root)["inferpool.num_instances"] == 20
    assert all(list(below(spans, each)) == ["queue", "prepare", "compute"] for each in instances)


def test_instances_have_outcomes_of_their_own(traced: TracedService):
    instances = [each for each in traced.spans("some fail") if each.name == "instance"]
    outcomes = [about(each)["inferpool.outcome"] for each in instances]
    assert outcomes == ["succeeded", "model_error"]
    assert about(traced.root("some fail"))["inferpool.outcome"] == "succeeded"


def test_other_routes_are_traced_once_where_their_caller_is(traced: TracedService):
    assert [span.name for span in traced.spans("health")] == ["GET /health"]
    assert [span.name for span in traced.spans("nothing")] == ["GET"]
    assert about(traced.root("nothing"))["error.type"] == "404"
    asked = {traced.trace_id(name) for name in CALLS}
    assert {span.trace_id.hex() for span in traced.collector.spans} <= asked  # and no probes


def test_a_call_that_its_caller_does_not_sample_is_not_traced(traced: TracedService):
    assert not traced.spans("not sampled")
    assert traced.answers["not sampled"].headers["traceparent"].endswith("-00")


def test_the_histogram_of_durations_names_traces(traced: TracedService):
    lines = [line for line in traced.metrics.splitlines() if " # {" in line]
    assert all(line.startswith("inferpool_request_duration_seconds_bucket") for line in lines)
    named = set(re.findall(r'trace_id="(\w+)"', "".join(lines)))
    assert named
    assert named <= {traced.trace_id(name) for name in CALLS}


def test_log_lines_about_a_call_name_its_trace_and_span(traced: TracedService):
    root = traced.root("fails")
    ids = {"trace_id": traced.trace_id("fails"), "span_id": root.span_id.hex()}
    lines = [line for line in traced.service.log if ids.items() <= line.items()]
    assert {line["logger"] for line in lines} == {
        "inferpool.workers.inside.outcomes",
        "inferpool.service.endpoint",
    }
