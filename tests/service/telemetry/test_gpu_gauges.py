from inferpool.service.telemetry.gpu_gauges import gpu_gauges
from inferpool.service.telemetry.metrics import Metrics
from inferpool.workers.host.gpu_watch import GpuVitals


def test_a_gpu_that_is_lost_is_shown_with_what_is_known_of_it():
    lost = GpuVitals(
        index=1,
        uuid="GPU-b",
        name="H100",
        is_up=False,
        memory_bytes=80,
        num_xid_errors=1,
        last_xid=79,
    )
    well = GpuVitals(
        index=0,
        uuid="GPU-a",
        name="H100",
        is_up=True,
        memory_bytes=80,
        used_bytes=7,
        utilization=0.5,
    )
    metrics = Metrics(["m"], {})
    metrics.gauge_source(lambda: gpu_gauges([well, lost]))
    text = metrics.render()[0].decode()
    for line in (
        'inferpool_gpu_up{gpu="0",uuid="GPU-a"} 1.0',
        'inferpool_gpu_memory_used_bytes{gpu="0",uuid="GPU-a"} 7.0',
        'inferpool_gpu_utilization_ratio{gpu="0",uuid="GPU-a"} 0.5',
        'inferpool_gpu_up{gpu="1",uuid="GPU-b"} 0.0',
        'inferpool_gpu_xid_errors_total{gpu="1",uuid="GPU-b"} 1.0',
        'inferpool_gpu_last_xid{gpu="1",uuid="GPU-b"} 79.0',
    ):
        assert line in text
    assert 'inferpool_gpu_memory_used_bytes{gpu="1"' not in text, "it is not known"
