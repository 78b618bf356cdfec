from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from inferpool.service.telemetry.distribution import Distribution
from inferpool.service.telemetry.metrics import (
    COUNTERS,
    GAUGES,
    NO_MODEL,
    Metrics,
    ModelMetrics,
    Reading,
    gpu_gauges,
)
from tests.page_states import gpu


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["resnet"], {"version": "0.1.0"})


def samples(metrics: Metrics, accept: str = "") -> dict[tuple[str, str], float]:
    """Values by name and labels, as Prometheus reads them."""
    body, content_type = metrics.render(accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_a_scrape_reads_what_was_recorded(metrics, accept):
    model = metrics.model("resnet")
    model.requests[200] += 3
    model.accepted += 9
    model.in_flight = 2
    model.succeeded += 4
    model.failed += 1
    model.expired += 1
    model.cancelled += 1
    model.rejected["queue_full"] += 2
    model.unfit += 3
    model.restarts["hang"] += 1
    model.batch_size.observe(4)
    model.prepare_duration.observe(0.002)
    model.inference_duration.observe(0.03)
    model.queue_wait.observe(0.0004)
    model.answer_duration.observe(0.2)
    metrics.gauge_source(
        lambda: [
            Reading(name="arena_bytes", value=1024),
            Reading(name="workers", value=2, labels=("resnet", "ready")),
        ]
    )
    found = samples(metrics, accept)
    assert found["inferpool_requests_total", "code=200,model=resnet"] == 3
    assert found["inferpool_instances_total", "model=resnet,outcome=accepted"] == 9
    assert found["inferpool_instances_in_flight", "model=resnet"] == 2
    assert found["inferpool_rejected_total", "model=resnet,reason=queue_full"] == 2
    assert found["inferpool_instances_unfit_total", "model=resnet"] == 3
    assert found["inferpool_worker_restarts_total", "model=resnet,reason=hang"] == 1
    assert found["inferpool_batch_size_bucket", "le=4.0,model=resnet"] == 1
    assert found["inferpool_batch_size_sum", "model=resnet"] == 4
    assert found["inferpool_prepare_duration_seconds_count", "model=resnet"] == 1
    assert found["inferpool_inference_duration_seconds_sum", "model=resnet"] == 0.03
    assert found["inferpool_queue_wait_seconds_bucket", "le=0.0005,model=resnet"] == 1
    assert found["inferpool_queue_wait_seconds_bucket", "le=0.00025,model=resnet"] == 0
    assert found["inferpool_request_duration_seconds_bucket", "le=+Inf,model=resnet"] == 1
    assert found["inferpool_arena_bytes", ""] == 1024
    assert found["inferpool_workers", "model=resnet,state=ready"] == 2
    assert found["inferpool_build_info", "version=0.1.0"] == 1
    assert ("process_resident_memory_bytes", "") in found


def test_every_reason_is_there_from_the_start_so_that_a_rate_sees_its_first_step(metrics):
    found = samples(metrics)
    for reason in ("queue_full", "arena_full", "deadline", "draining", "unavailable"):
        assert found["inferpool_rejected_total", f"model=resnet,reason={reason}"] == 0
    for reason in ("exit", "hang", "signal", "start"):
        assert found["inferpool_worker_restarts_total", f"model=resnet,reason={reason}"] == 0


def test_names_made_up_by_callers_become_no_labels(metrics):
    for name in ("x", "y", "'; drop"):
        metrics.model(name).requests[404] += 1
    found = samples(metrics)
    assert found["inferpool_requests_total", f"code=404,model={NO_MODEL}"] == 3
    assert {labels for _, labels in found if "drop" in labels} == set()


def test_a_broken_source_costs_only_its_own_gauges(metrics, caplog):
    def broken():
        raise RuntimeError("gone")

    metrics.gauge_source(broken)
    metrics.gauge_source(lambda: [Reading(name="connections", value=1)])
    assert samples(metrics)["inferpool_connections", ""] == 1
    assert "a source of gauges failed" in caplog.text


def test_every_reading_can_be_rendered_in_both_formats(metrics):
    described = {**GAUGES, **COUNTERS}
    metrics.gauge_source(
        lambda: [
            Reading(name=name, value=1, labels=labels) for name, (_, labels) in described.items()
        ]
    )
    for accept in ("", "application/openmetrics-text"):
        names = {name for name, _ in samples(metrics, accept)}
        assert {f"inferpool_{name}" for name in GAUGES} <= names
        assert {f"inferpool_{name}_total" for name in COUNTERS} <= names


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_durations_of_jobs_are_shown_where_jobs_are_kept(metrics, accept):
    name = "inferpool_job_duration_seconds"
    assert (f"{name}_sum", "") not in samples(metrics, accept)
    metrics.job_durations = Distribution((1.0, 60.0))
    for duration_s in (0.5, 3.5, 100.0):
        metrics.job_durations.observe(duration_s)
    found = samples(metrics, accept)
    assert found[f"{name}_bucket", "le=60.0"] == 2
    assert (found[f"{name}_count", ""], found[f"{name}_sum", ""]) == (3, 104.0)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html,application/xhtml+xml", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/openmetrics-text; version=x.y", "application/openmetrics-text"),
        ("text/plain; version=one", "text/plain; version=0.0.4"),
        (";;,=,\xff", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_follows_the_accept_header_whatever_it_holds(metrics, accept, content_type):
    body, got = metrics.render(accept)
    assert got.startswith(content_type)
    assert body.endswith(b"# EOF\n") == ("openmetrics" in got)


def test_a_gpu_that_is_lost_is_shown_with_what_is_known_of_it(metrics):
    lost = replace(gpu(1), uuid="b", up=False, memory_used_bytes=None, xid_errors=1, last_xid=79)
    well = replace(gpu(0), uuid="a", memory_used_bytes=7, utilization=0.5)
    metrics.gauge_source(lambda: gpu_gauges([well, lost]))
    found = samples(metrics)
    for name, label, value in (
        ("up", "gpu=0,uuid=a", 1),
        ("memory_used_bytes", "gpu=0,uuid=a", 7),
        ("utilization_ratio", "gpu=0,uuid=a", 0.5),
        ("up", "gpu=1,uuid=b", 0),
        ("xid_errors_total", "gpu=1,uuid=b", 1),
        ("last_xid", "gpu=1,uuid=b", 79),
    ):
        assert found[f"inferpool_gpu_{name}", label] == value
    assert ("inferpool_gpu_memory_used_bytes", "gpu=1,uuid=b") not in found, "it is not known"


def test_a_label_that_a_reading_leaves_out_is_not_there(metrics):
    one = replace(gpu(0), uuid="a")
    metrics.gauge_source(lambda: [*gpu_gauges([one]), *gpu_gauges([one], "far")])
    found = samples(metrics)
    assert found["inferpool_gpu_up", "gpu=0,uuid=a"] == 1
    assert found["inferpool_gpu_up", "gpu=0,host=far,uuid=a"] == 1


def test_what_batches_took_is_kept_in_few_numbers_until_it_is_read():
    model = ModelMetrics("m")
    for _ in range(5000):
        model.observe_batch(2, 0.001, 0.002, [0.003, 0.003])
        assert len(model.batch_size.pending) < 4096
        assert len(model.queue_wait.pending) < 4096
    assert (model.batch_size.count, model.queue_wait.count) == (5000, 10_000)
