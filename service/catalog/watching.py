"""Looks for a version that serves and is worse than the former one."""

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.catalog.requests import SwapOptions
from inferpool.service.telemetry.metrics import ModelMetrics

_LEAST_ANSWERS = 50
"""With fewer answers of a version, its faults and times are not judged."""


def why_worse(old: ModelVersion, new: ModelVersion, options: SwapOptions) -> str:
    """Return why a version that serves is worse than the former one; empty if it is not."""
    num = _num_computed(new.metrics)
    if num < _LEAST_ANSWERS:
        return ""
    faults = new.metrics.faults / num
    before = old.metrics.faults / max(1, _num_computed(old.metrics))
    if faults > before + options.max_fault_share:
        return (
            f"it fails on {faults:.2%} of {num} inputs, the former version on {before:.2%}; "
            f"max_fault_share is {options.max_fault_share:g}"
        )
    if _num_computed(old.metrics) >= _LEAST_ANSWERS:
        ratio = _work_s(new.metrics) / _work_s(old.metrics)
        if ratio > options.max_latency_ratio:
            return (
                f"it takes {ratio:.2f} times as long for an input as the former version, "
                f"max_latency_ratio is {options.max_latency_ratio:g}"
            )
    return ""


def _num_computed(metrics: ModelMetrics) -> int:
    return metrics.succeeded + metrics.faults


def _work_s(metrics: ModelMetrics) -> float:
    """Return the time that workers spent on an input, on average."""
    spent_s = metrics.prepare_duration.sum + metrics.inference_duration.sum
    return spent_s / max(1.0, metrics.batch_size.sum)
