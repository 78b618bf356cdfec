import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.gpus import Gpu
from tests.fake_driver.driver import IS_LOST, NOT_SUPPORTED, FakeDriver, h100, mig_slice

GPU = Gpu(index=0, uuid="GPU-0", name="H100", memory_bytes=80 << 30, cpus=())


class TaciturnError(Exception):
    """The error of a driver that answers nothing."""

    value = NOT_SUPPORTED


class TaciturnNvml:
    """A fake of pynvml that only finds GPUs."""

    NVMLError = TaciturnError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = IS_LOST, 16, 999
    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def __getattr__(self, name: str) -> Callable[..., object]:
        return self._refuse

    def _refuse(self, *_: object) -> object:
        raise TaciturnError("Not Supported")


def until(claim: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_gpus_of_a_silent_driver_are_down(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("inferpool.workers.host.gpu_watch.time", clock)
    watch = GpuWatch([GPU], TaciturnNvml())
    assert watch.vitals() == []
    watch.look()
    now += 29.9
    assert watch.vitals()[0].up
    now += 0.1
    assert not watch.vitals()[0].up


def test_missing_driver_only_ends_the_watch(caplog: pytest.LogCaptureFixture):
    watch = GpuWatch([GPU], TaciturnNvml())
    watch.start()
    until(lambda: "the GPUs are not watched: NVML says Not Supported" in caplog.text)
    assert watch.vitals() == []


WATCH = """
import dataclasses, json, sys, threading, pynvml
from inferpool.workers.host.devices import find_host
from inferpool.workers.host.gpu_watch import GpuWatch

watch = GpuWatch(find_host(None).gpus, pynvml, every_s=0.01)
watch.start()
for line in sys.stdin:  # each asks once
    print(json.dumps([dataclasses.asdict(vitals) for vitals in watch.vitals()]), flush=True)
watch.stop()
[each.join() for each in threading.enumerate() if each.name == "watch GPUs"]
"""


def test_watch_of_a_driver_sees_what_happens_to_its_gpus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    silent = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceRegisterEvents": NOT_SUPPORTED}
    machine = {"GPU-a": h100(used=7 << 30, utilization=37), "GPU-gb10": h100(**silent)}
    machine |= {"GPU-c": h100()}
    machine |= {"GPU-cut": h100(), "MIG-a": mig_slice("GPU-cut"), "MIG-b": mig_slice("GPU-cut")}
    driver = FakeDriver(tmp_path, machine)
    with driver.start(WATCH) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def seen() -> dict[str, SimpleNamespace]:
            print(file=process.stdin, flush=True)
            found = json.loads(process.stdout.readline())
            return {each["uuid"]: SimpleNamespace(**each) for each in found}

        until(seen)
        before = seen()
        assert list(before) == ["GPU-a", "GPU-gb10", "GPU-c", "MIG-a", "MIG-b"]
        assert all(gpu.up for gpu in before.values())
        well = before["GPU-a"]
        assert (well.memory_used_bytes, well.memory_bytes) == (7 << 30, 80 << 30)
        assert (well.utilization, well.temperature_c, well.power_w) == (0.37, 40, 70.0)
        assert before["GPU-gb10"].memory_used_bytes is None
        assert before["GPU-gb10"].memory_bytes > 0
        assert before["MIG-a"].memory_bytes == 10 << 30
        assert before["MIG-a"].utilization is before["MIG-a"].temperature_c is None

        machine["GPU-a"] = h100(nvmlDeviceGetMemoryInfo=IS_LOST, xid=[79])
        machine["GPU-c"] = h100(nvmlDeviceGetHandleByUUID=IS_LOST)
        machine["GPU-cut"] = h100(xid=[31, 43])
        driver.describe(machine)
        until(lambda: not seen()["GPU-a"].up and seen()["MIG-b"].xid_errors == 2)
        after = seen()
        assert not after["GPU-c"].up
        assert after["GPU-c"].memory_used_bytes is None
        errors = {uuid: (gpu.xid_errors, gpu.last_xid) for uuid, gpu in after.items()}
        assert errors == {
            "GPU-a": (1, 79),
            "GPU-gb10": (None, 0),
            "GPU-c": (0, 0),
            "MIG-a": (2, 43),
            "MIG-b": (2, 43),
        }
        process.stdin.close()
        assert process.wait(60) == 0
    assert "GPU GPU-a: the driver reports Xid 79" in capfd.readouterr().err
    assert driver.calls()[-1].function == "nvmlShutdown"
