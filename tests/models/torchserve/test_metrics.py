"""Metrics of handlers, which go to the log."""

import logging

import pytest

from inferpool.models.torchserve import metrics as module
from inferpool.models.torchserve.metrics import Dimension, HandlerMetrics, MetricTypes


@pytest.fixture
def metrics(caplog, monkeypatch):
    monkeypatch.setattr(module, "_window", module._Window())
    caplog.set_level(logging.INFO)
    found = HandlerMetrics("fruit")
    found.request_ids = {0: "r0", 1: "r1"}
    return found


def logged(caplog) -> list[str]:
    return [record.getMessage().partition("|#hostname")[0] for record in caplog.records]


def test_values_are_logged_as_torchserve_does(metrics, caplog):
    metrics.add_counter("Apples", 2)
    metrics.add_size("Image", 3.5, idx=1, unit="kB")
    metrics.add_time("Peeling", 7, dimensions=[Dimension("Knife", "sharp")])
    metrics.add_error("Worm", "found")

    assert logged(caplog) == [
        "[METRICS]Apples.Count:2|#ModelName:fruit,Level:Model|#type:COUNTER",
        "[METRICS]Image.Kilobytes:3.5|#ModelName:fruit,Level:Model|#type:GAUGE",
        "[METRICS]Peeling.Milliseconds:7|#Knife:sharp,ModelName:fruit,Level:Model|#type:GAUGE",
        "[METRICS]Worm.unit:found|#Level:Error|#type:COUNTER",
    ]
    assert caplog.records[0].getMessage().endswith(",r0,r1")
    assert caplog.records[1].getMessage().endswith(",r1")


def test_a_metric_of_a_metrics_config_has_any_dimensions(metrics, caplog):
    metrics.get_metric("Batch", MetricTypes.GAUGE).add_or_update(5, ["fruit"])

    assert logged(caplog) == ["[METRICS]Batch.unit:5|#dimension_0:fruit|#type:GAUGE"]


def test_a_value_that_does_not_fit_is_logged_as_an_error(metrics, caplog):
    metric = metrics.add_metric_to_cache("Apples", "count", ["Kind"])

    metric.add_or_update(-1, ["red"])
    metric.add_or_update(1, [])

    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_times_of_torchserve_itself_are_left_out(metrics, caplog):
    metrics.add_time("HandlerTime", 3)

    assert not caplog.records
    with pytest.raises(ValueError, match="Peeling: the unit of a time"):
        metrics.add_time("Peeling", 3, unit="kB")


def test_a_handler_that_logs_much_fills_no_log(metrics, caplog):
    for _ in range(1000):
        metrics.add_counter("Apples", 1)

    assert len(caplog.records) == 100
    for number in range(999):
        metrics.add_counter(f"Apples {number}", 1)
    metrics.add_counter("Pears", 1)
    assert len(metrics.cache[MetricTypes.COUNTER]) == 1000
