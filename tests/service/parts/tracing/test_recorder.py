import pytest

from inferpool.models.attached import protocol_at
from inferpool.service.api.exchange import Call, begin_call
from inferpool.service.parts.tracing.recorder import MAX_WAITING, Recorder
from inferpool.service.telemetry.metrics import ModelMetrics

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-%s"


def make(ratio: float, *, is_parent_based: bool = True) -> Recorder:
    return Recorder(ratio, is_parent_based=is_parent_based, metrics=ModelMetrics)


def begun(recorder: Recorder, flags: str | None = None) -> Call:
    headers = [] if flags is None else [(b"traceparent", (PARENT % flags).encode())]
    call = begin_call("POST", "/predict", b"", headers)
    recorder.begin(call)
    return call


def share(recorder: Recorder, num: int = 4000) -> float:
    calls = [begun(recorder) for _ in range(num)]
    assert all((call.steps is not None) == (call.flags == "01") for call in calls)
    return sum(call.steps is not None for call in calls) / num


def test_the_requested_share_of_calls_is_traced() -> None:
    assert share(make(0.0)) == 0
    assert share(make(1.0)) == 1
    assert share(make(0.5)) == pytest.approx(0.5, abs=0.05)  # 6 sigma


def test_a_caller_decides_unless_the_settings_say_no() -> None:
    assert begun(make(1.0), "00").steps is None
    assert begun(make(0.0), "01").steps == []
    assert begun(make(0.0), "03").flags == "03"
    assert begun(make(1.0, is_parent_based=False), "00").flags == "01"
    assert begun(make(0.0, is_parent_based=False), "01").flags == "00"


def test_a_call_with_a_reused_head_is_decided_again() -> None:
    call = begun(make(1.0))
    assert call.ref.trace
    make(0.0).begin(call)
    assert (call.steps, call.flags, call.ref.trace) == (None, "00", "")


def test_calls_beyond_the_bound_are_dropped_and_counted() -> None:
    recorder = make(1.0)
    for _ in range(MAX_WAITING + 3):
        recorder.take(begun(recorder), 200, 0.1)
    assert len(recorder.waiting) == MAX_WAITING
    assert recorder.num_dropped == 3
    assert recorder.wake.is_set()


def test_a_call_that_waits_keeps_nothing_of_its_body() -> None:
    recorder = make(1.0)
    call = begin_call("POST", "/v2/models/a/infer", b"", [(b"x", b"y")])
    recorder.begin(call)
    call.protocol = protocol_at(call.path)
    recorder.take(call, 200, 0.1)
    assert (recorder.waiting[0].call.protocol, call.headers) == (None, {})
