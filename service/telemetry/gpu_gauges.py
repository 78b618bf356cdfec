"""What `/metrics` says of the GPUs."""

from collections.abc import Iterable, Iterator

from inferpool.service.telemetry.metrics import Reading
from inferpool.workers.host.gpu_watch import GpuVitals


def gpu_gauges(gpus: Iterable[GpuVitals]) -> Iterator[Reading]:
    """What is known of each of them."""
    for gpu in gpus:
        labels = (str(gpu.index), gpu.uuid)
        for name, value in (
            ("up", gpu.is_up),
            ("memory_bytes", gpu.memory_bytes),
            ("memory_used_bytes", gpu.used_bytes),
            ("utilization_ratio", gpu.utilization),
            ("temperature_celsius", gpu.temperature_c),
            ("power_watts", gpu.power_w),
            ("last_xid", gpu.last_xid),
            ("xid_errors", gpu.num_xid_errors),
        ):
            if value is not None:
                yield Reading(name=f"gpu_{name}", value=value, labels=labels)
