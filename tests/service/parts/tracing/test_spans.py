import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from inferpool.service.api.exchange import Exchange, Predict
from inferpool.service.errors import OverloadedError, ServiceError, UnavailableError
from inferpool.service.parts.tracing.recorder import Ended, Recorder
from inferpool.service.parts.tracing.spans import add_spans
from inferpool.service.queue.instance import Attempt, InstanceSteps
from inferpool.service.telemetry.metrics import ModelMetrics
from tests.collector import attributes
from tests.service.api.fakes import FakeModel, NoWire, endpoint, post


def spans_of(ended: Ended) -> list[Span]:
    made = ScopeSpans()
    add_spans(ended, "https", 10**18, made)
    return list(made.spans)


def traced(model: FakeModel) -> tuple[Recorder, Predict]:
    recorder = Recorder(1.0, is_parent_based=True, metrics=ModelMetrics)
    return recorder, endpoint(model, tracing=recorder)


@pytest.mark.parametrize(
    ("error", "status", "is_failure"),
    [(OverloadedError("full"), 429, False), (UnavailableError("draining"), 503, True)],
)
def test_a_refusal_becomes_an_event(error: ServiceError, status: int, is_failure: bool) -> None:
    recorder, predict = traced(FakeModel(refusals=[error]))
    answer = post(predict, content=b"x", headers={"content-type": "image/png"})
    assert answer.status_code == status
    (root,) = spans_of(recorder.waiting.pop())
    assert answer.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert (root.status.code == Status.STATUS_CODE_ERROR) == is_failure
    (event,) = root.events
    assert event.name == "refused"
    assert attributes(iter(event.attributes)) == {"code": error.code, "message": error.message}
    found = attributes(iter(root.attributes))
    assert (found["error.type"], found["url.scheme"]) == (error.code, "https")


def test_a_call_that_its_client_left_has_no_status() -> None:
    recorder, predict = traced(FakeModel())
    Exchange.open(NoWire(), predict, "POST", "/predict", b"", [(b"host", b"[::1]:80")]).close(499)
    (root,) = spans_of(recorder.waiting.pop())
    found = attributes(iter(root.attributes))
    assert "http.response.status_code" not in found
    assert found["error.type"] == "cancelled"
    assert (found["server.address"], found["server.port"]) == ("::1", 80)
    assert not root.status.code


def test_a_request_that_is_not_http_has_no_route() -> None:
    recorder, predict = traced(FakeModel())
    exchange = Exchange.open(NoWire(), predict, "-", "what", b"", [])
    exchange.call.entry = None
    exchange.close(400)
    (root,) = spans_of(recorder.waiting.pop())
    found = attributes(iter(root.attributes))
    assert root.name == "HTTP"
    assert found["http.request.method"] == "_OTHER"
    assert "http.route" not in found


@pytest.mark.parametrize("host", ["", "gpu-7"])
def test_the_work_of_another_host_bears_its_name(host: str) -> None:
    recorder, predict = traced(FakeModel())
    exchange = Exchange.open(NoWire(), predict, "POST", "/predict", b"", [])
    attempt = Attempt("m/0", 0, "cpu", 1, 2.0, 2.5, 0.5, 3.0, 1.0, host=host)
    exchange.call.steps = [InstanceSteps(arrived=1.0, settled=4.0, tries=[attempt])]
    exchange.close(200)
    spans = {span.name: span for span in spans_of(recorder.waiting.pop())}
    for name in ("prepare", "compute"):
        assert attributes(iter(spans[name].attributes)).get("inferpool.host", "") == host


@pytest.mark.parametrize("code", ["", "stream_broken"])
def test_a_stream_has_spans_up_to_its_first_part_and_from_there_to_its_end(code: str) -> None:
    recorder, predict = traced(FakeModel())
    exchange = Exchange.open(NoWire(), predict, "POST", "/predict", b"", [])
    attempt = Attempt("m/0", 0, "cpu", 1, 2.0, first_part=2.5)
    steps = InstanceSteps(arrived=1.0, settled=4.0, code=code, message="it died", tries=[attempt])
    exchange.call.steps = [steps]
    exchange.close(200)
    spans = {span.name: span for span in spans_of(recorder.waiting.pop())}
    first, further = spans["first part"], spans["further parts"]
    assert first.end_time_unix_nano - first.start_time_unix_nano == 500_000_000
    assert further.end_time_unix_nano - further.start_time_unix_nano == 1_500_000_000
    assert attributes(iter(further.attributes)).get("error.type", "") == code
    assert "attempt" not in spans
