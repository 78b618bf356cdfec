import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inferpool.service.errors import StartError
from inferpool.service.parts.tracing.recorder import MAX_BATCH
from inferpool.service.parts.tracing.setup import make_tracer, set_up_tracing
from inferpool.service.parts.tracing.tracer import ExportPeriods, Tracer
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.metrics import ModelMetrics
from tests.collector import FakeCollector, collecting
from tests.service.parts.tracing.test_recorder import begun


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with collecting() as found:
        yield found


@pytest.fixture
def unused_url() -> Iterator[str]:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


def settings_for(endpoint: str | None) -> Settings:
    return Settings(
        default_model="echo", models={"echo": ModelSettings(source="echo")}, trace_endpoint=endpoint
    )


def tracer_for(endpoint: str, *, flush_s: float = 100, pauses_s: Sequence[float] = ()) -> Tracer:
    periods = ExportPeriods(request_s=100, pauses_s=pauses_s, flush_s=flush_s)
    return Tracer(settings_for(endpoint), ModelMetrics, periods=periods)


def exporting(tracer: Tracer) -> bool:
    return tracer._thread.is_alive()


def trace(tracer: Tracer, num: int) -> None:
    for _ in range(num):
        tracer.recorder.take(begun(tracer.recorder), 200, 0.1)


def wait_until(tracer: Tracer, exported: int, dropped: int) -> None:
    until = time.monotonic() + 100
    while tracer.counts() != (exported, dropped):
        assert time.monotonic() < until, tracer.counts()
        time.sleep(0.01)


def test_waiting_calls_are_exported_at_the_end(collector: FakeCollector) -> None:
    tracer = tracer_for(collector.url)
    tracer.start()
    trace(tracer, MAX_BATCH + 1)
    tracer.stop()
    assert tracer.counts() == (MAX_BATCH + 1, 0)
    assert len({span.span_id for span in collector.spans}) == MAX_BATCH + 1


def test_a_collector_that_is_busy_is_tried_again(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    collector.status = 503
    tracer = tracer_for(collector.url, pauses_s=(0.01,) * 50_000)
    tracer.start()
    trace(tracer, MAX_BATCH)
    until = time.monotonic() + 100
    while collector.num_asked < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    collector.status = 200
    wait_until(tracer, MAX_BATCH, 0)
    tracer.stop()
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"traces cannot be sent to {collector.url}/v1/traces: ")
    assert last == "traces are sent again; 0 calls were lost"


def test_refused_spans_are_logged_once(
    collector: FakeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 401
    tracer = tracer_for(collector.url)
    tracer.start()
    for round in (1, 2):
        trace(tracer, MAX_BATCH)
        wait_until(tracer, 0, round * MAX_BATCH)
    tracer.stop()
    assert collector.num_asked == 2  # it is not tried again
    assert ["401" in record.getMessage() for record in caplog.records] == [True]


def test_a_silent_collector_does_not_hold_up_the_end(collector: FakeCollector) -> None:
    collector.may_answer.clear()
    tracer = tracer_for(collector.url, flush_s=0.2)
    tracer.start()
    trace(tracer, 3)
    tracer.stop()
    assert exporting(tracer)  # and the end has not waited for it
    collector.may_answer.set()
    wait_until(tracer, 3, 0)


def test_the_end_does_not_wait_to_try_again(unused_url: str) -> None:
    tracer = tracer_for(unused_url, pauses_s=[1000])
    tracer.start()
    trace(tracer, 3)
    tracer.stop()
    assert not exporting(tracer)
    assert tracer.counts() == (0, 3)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tracer", "spans"):
        monkeypatch.delitem(sys.modules, f"inferpool.service.parts.tracing.{name}")
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.resource.v1.resource_pb2", None)
    assert make_tracer(settings_for(None), ModelMetrics) is None
    with pytest.raises(StartError, match=r"pip install 'inferpool\[otel\]'"):
        make_tracer(settings_for("http://localhost:4318"), ModelMetrics)


def test_platform_variables_cannot_stop_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = str(tmp_path / "nowhere.pem")
    settings = settings_for("https://h").model_copy(update={"trace_certificate": nowhere})
    by_platform = "environment OTEL_EXPORTER_OTLP_ENDPOINT"
    in_force, tracer = set_up_tracing(settings, by_platform, ModelMetrics)
    assert (in_force.trace_endpoint, tracer) == (None, None)
    assert f"calls are not traced although {by_platform} asks for it" in caplog.text
    with pytest.raises(StartError, match=r"nowhere\.pem"):
        set_up_tracing(settings, "file inferpool.toml", ModelMetrics)
    no_certificate = settings.model_copy(update={"trace_certificate": __file__})
    with pytest.raises(StartError, match="trace_certificate: "):
        make_tracer(no_certificate, ModelMetrics)
