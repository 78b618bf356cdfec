import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.gpus import Gpu
from tests.fake_driver.driver import IS_LOST, NOT_SUPPORTED, FakeDriver, h100, mig_slice

LOST, TIMED_OUT, UNSUPPORTED = 15, 10, 3


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """A fake of pynvml whose handles are UUIDs; calls named in `errors` fail."""

    NVMLError = FakeNvmlError
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_UNKNOWN = 999
    NVML_TEMPERATURE_GPU = 0
    event_type_xid_critical_error = 8

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.xids: list[tuple[str, int]] = []
        self.listened_to: list[str] = []
        self.is_open = False

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("nvml"))
        return getattr(self, words.lower())

    def init(self) -> None:
        self._fail("init")
        self.is_open = True

    def shutdown(self) -> None:
        self.is_open = False

    def device_get_handle_by_uuid(self, uuid: str) -> str:
        self._fail(uuid)
        return uuid

    def device_get_uuid(self, handle: str) -> str:
        return handle

    def device_get_memory_info(self, handle: str) -> SimpleNamespace:
        self._fail("memory")
        return SimpleNamespace(used=7 << 30)

    def device_get_utilization_rates(self, handle: str) -> SimpleNamespace:
        self._fail("utilization")
        return SimpleNamespace(gpu=37)

    def device_get_temperature(self, handle: str, sensor: int) -> int:
        return 61

    def device_get_power_usage(self, handle: str) -> int:
        return 312_500

    def event_set_create(self) -> object:
        return object()

    def device_register_events(self, handle: str, types: int, events: object) -> None:
        assert types == self.event_type_xid_critical_error
        self.listened_to.append(handle)

    def event_set_wait_v2(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise FakeNvmlError(TIMED_OUT)
        uuid, xid = self.xids.pop(0)
        return SimpleNamespace(device=uuid, eventData=xid)

    def _fail(self, what: str) -> None:
        if what in self.errors:
            raise FakeNvmlError(self.errors[what])


def gpu(number: int, **changes: str) -> Gpu:
    uuid = changes.pop("uuid", f"GPU-{number}")
    return Gpu(index=number, uuid=uuid, name="H100", memory_bytes=80 << 30, cpus=(), **changes)


@pytest.fixture
def nvml():
    return FakeNvml()


def until(claim):
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_state_of_the_gpus_is_known_after_the_first_look(nvml):
    watch = GpuWatch([gpu(0), gpu(1)], nvml)
    nvml.errors["GPU-1"] = LOST
    assert watch.vitals() == []
    watch.look()
    well, lost = watch.vitals()
    assert (well.up, well.memory_used_bytes, well.memory_bytes) == (True, 7 << 30, 80 << 30)
    assert (well.utilization, well.temperature_c, well.power_w) == (0.37, 61, 312.5)
    assert (lost.up, lost.memory_used_bytes, lost.index) == (False, None, 1)


def test_gpu_whose_memory_cannot_be_read_because_it_is_lost_is_down(nvml):
    watch = GpuWatch([gpu(0)], nvml)
    nvml.errors["memory"] = LOST
    watch.look()
    assert not watch.vitals()[0].up


def test_gpu_is_up_even_if_some_values_are_not_supported(nvml):
    watch = GpuWatch([gpu(0)], nvml)
    nvml.errors = {"memory": UNSUPPORTED, "utilization": UNSUPPORTED}
    watch.look()
    assert watch.vitals()[0].up
    assert watch.vitals()[0].memory_used_bytes is watch.vitals()[0].utilization is None


def test_xid_errors_are_counted_by_the_thread_and_shown_for_each_slice(nvml, caplog):
    nvml.xids = [("GPU-0", 31), ("GPU-0", 79)]
    slices = [gpu(0, uuid=f"MIG-{n}", sliced_from="GPU-0") for n in range(2)]
    watch = GpuWatch([*slices, gpu(1)], nvml)
    watch.start()
    until(watch.vitals)
    assert [(each.xid_errors, each.last_xid) for each in watch.vitals()] == [
        (2, 79),
        (2, 79),
        (0, 0),
    ]
    assert sorted(nvml.listened_to) == ["GPU-0", "GPU-1"]
    assert "Xid 79" in caplog.text
    watch.stop()
    until(lambda: not nvml.is_open)


def test_gpus_of_a_silent_driver_are_down(nvml, monkeypatch):
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("inferpool.workers.host.gpu_watch.time", clock)
    watch = GpuWatch([gpu(0)], nvml)
    watch.look()
    now += 29.9
    assert watch.vitals()[0].up
    now += 0.1
    assert not watch.vitals()[0].up


def test_missing_driver_only_ends_the_watch(nvml, caplog):
    nvml.errors["init"] = 12
    watch = GpuWatch([gpu(0)], nvml)
    watch.start()
    until(lambda: "not watched" in caplog.text)
    assert watch.vitals() == []


WATCH = """
import dataclasses, json, sys, pynvml
from inferpool.workers.host.devices import find_host
from inferpool.workers.host.gpu_watch import GpuWatch

watch = GpuWatch(find_host(None).gpus, pynvml, every_s=0.01)
watch.start()
for line in sys.stdin:  # each asks once
    print(json.dumps([dataclasses.asdict(vitals) for vitals in watch.vitals()]), flush=True)
watch.stop()
"""


def test_watch_of_a_driver_sees_what_happens_to_its_gpus(tmp_path: Path):
    silent = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceRegisterEvents": NOT_SUPPORTED}
    machine = {"GPU-a": h100(used=7 << 30, utilization=37), "GPU-gb10": h100(**silent)}
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
        assert list(before) == ["GPU-a", "GPU-gb10", "MIG-a", "MIG-b"]
        assert all(gpu.up for gpu in before.values())
        well = before["GPU-a"]
        assert (well.memory_used_bytes, well.utilization, well.power_w) == (7 << 30, 0.37, 70.0)
        assert before["GPU-gb10"].memory_used_bytes is None
        assert before["GPU-gb10"].memory_bytes > 0
        assert before["MIG-a"].memory_bytes == 10 << 30
        assert before["MIG-a"].utilization is before["MIG-a"].temperature_c is None

        machine["GPU-a"] = h100(nvmlDeviceGetMemoryInfo=IS_LOST, xid=[79])
        machine["GPU-cut"] = h100(xid=[31, 43])
        driver.describe(machine)
        until(lambda: not seen()["GPU-a"].up and seen()["MIG-b"].xid_errors == 2)
        after = seen()
        errors = {uuid: (gpu.xid_errors, gpu.last_xid) for uuid, gpu in after.items()}
        assert errors == {
            "GPU-a": (1, 79),
            "GPU-gb10": (None, 0),
            "MIG-a": (2, 43),
            "MIG-b": (2, 43),
        }
        process.stdin.close()
        assert process.wait(60) == 0
