"""Shows counters of ours as TorchServe's metrics, by its names and in its form.

Nothing is counted a second time. Gauges of TorchServe's last batch (QueueTime, HandlerTime,
PredictionTime) are left out: they say nothing of the others, and the counters give means over any
time. Runs in the main process's event loop.
"""

import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from inferpool.service.parts.torchserve.description import NamedModels
from inferpool.service.service import Service
from inferpool.service.telemetry.metrics import ModelMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MIB, _GIB = 2**20, 2**30
_COUNTERS = {
    "Requests2XX": "Count",
    "Requests4XX": "Count",
    "Requests5XX": "Count",
    "ts_inference_requests_total": "Count",
    "ts_inference_latency_microseconds": "Microseconds",
    "ts_queue_latency_microseconds": "Microseconds",
}
"""Counters of TorchServe's `ts/configs/metrics.yaml`, and their units."""
_GAUGES = {
    "CPUUtilization": "Percent",
    "MemoryUsed": "Megabytes",
    "MemoryAvailable": "Megabytes",
    "MemoryUtilization": "Percent",
    "DiskUsage": "Gigabytes",
    "DiskUtilization": "Percent",
    "DiskAvailable": "Gigabytes",
    "GPUUtilization": "Percent",
    "GPUMemoryUsed": "Megabytes",
    "GPUMemoryUtilization": "Percent",
}
"""Its gauges. WorkerThreadTime and WorkerLoadTime are not measured here."""


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    labels: Sequence[tuple[str, str]]
    value: float


class TorchServeMetrics:
    """Renders the metrics of a service."""

    def __init__(self, service: Service, served: NamedModels) -> None:
        """Render nothing yet."""
        self._service = service
        self._served = served
        self._host = socket.gethostname()

    async def render(self, names: Collection[str]) -> bytes:
        """Return the metrics with these names in Prometheus' text format; all if there are none."""
        await self._service.metrics.refresh()
        by_name: dict[str, list[_Sample]] = {}
        for sample in [*self._of_calls(), *self._of_models(), *self._of_host(), *self._of_gpus()]:
            by_name.setdefault(sample.name, []).append(sample)
        lines = []
        for kind, units in (("counter", _COUNTERS), ("gauge", _GAUGES)):
            for name, unit in units.items():
                if names and name not in names:
                    continue
                lines.append(f"# HELP {name} inferpool's, as TorchServe's {kind} in unit: {unit}")
                lines.append(f"# TYPE {name} {kind}")
                lines += map(_line, by_name.get(name, ()))
        return "".join(f"{line}\n" for line in lines).encode()

    def _of_calls(self) -> Iterator[_Sample]:
        """Count calls for predictions by their statuses, over all models."""
        metrics = self._service.metrics
        all_models = [metrics.total(name) for name in self._service.catalog.serving]
        for first in (2, 4, 5):
            num = sum(
                count
                for model in (*all_models, metrics.unknown_model, metrics.removed)
                for status, count in model.requests.items()
                if status // 100 == first
            )
            yield self._host_sample(f"Requests{first}XX", num)

    def _of_models(self) -> Iterator[_Sample]:
        for name, found in self._totals().items():
            labels = [("model_name", name), ("model_version", "default"), ("hostname", self._host)]
            for metric, value in (
                ("ts_inference_requests_total", sum(found.requests.values())),
                ("ts_inference_latency_microseconds", found.answer_duration.sum * 1e6),
                ("ts_queue_latency_microseconds", found.queue_wait.sum * 1e6),
            ):
                yield _Sample(metric, labels, value)

    def _totals(self) -> Mapping[str, ModelMetrics]:
        """Return the counters of each model with all versions of its archive."""
        totals: dict[str, ModelMetrics] = {}
        for key in self._service.catalog.serving:
            name = self._served.name_of(self._service.catalog.version(key))
            before = totals.get(name) or ModelMetrics(name)
            totals[name] = before + self._service.metrics.total(key)
        return totals

    def _of_host(self) -> Iterator[_Sample]:
        memory, disk = psutil.virtual_memory(), shutil.disk_usage("/")
        for name, value in (
            ("CPUUtilization", psutil.cpu_percent()),
            ("MemoryUsed", memory.used / _MIB),
            ("MemoryAvailable", memory.available / _MIB),
            ("MemoryUtilization", memory.percent),
            ("DiskUsage", disk.used / _GIB),
            ("DiskAvailable", disk.free / _GIB),
            ("DiskUtilization", 100 * disk.used / max(1, disk.used + disk.free)),
        ):
            yield self._host_sample(name, value)

    def _of_gpus(self) -> Iterator[_Sample]:
        for gpu in self._service.gpu_watch.vitals():
            device = ("DeviceId", str(gpu.index))
            labels = [("Level", "Host"), device, ("Hostname", self._host)]
            if gpu.utilization is not None:
                yield _Sample("GPUUtilization", labels, 100 * gpu.utilization)
            if gpu.memory_used_bytes is not None:
                used = gpu.memory_used_bytes
                yield _Sample("GPUMemoryUsed", labels, used / _MIB)
                yield _Sample("GPUMemoryUtilization", labels, 100 * used / gpu.memory_bytes)

    def _host_sample(self, name: str, value: float) -> _Sample:
        return _Sample(name, [("Level", "Host"), ("Hostname", self._host)], value)


def _line(sample: _Sample) -> str:
    labels = "".join(f'{name}="{_escaped(value)}",' for name, value in sample.labels)
    return f"{sample.name}{{{labels}}} {float(sample.value)}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
