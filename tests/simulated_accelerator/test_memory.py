"""Properties of the simulated accelerator's memory, and of the accounts that processes keep."""

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from tests.e2e.running import until
from tests.simulated_accelerator import fake_nvml

pytestmark = pytest.mark.simulated

READS = """
import ctypes, torch
x = torch.ones(4, device="sim")
torch.sim.synchronize()
ctypes.string_at(x.data_ptr(), 4)
"""
HOLDS = """
import sys, torch
x = torch.ones(300 << 20, dtype=torch.uint8, device="sim:1")
torch.sim.synchronize(1)
print("holds", flush=True)
sys.stdin.read()
"""
MIB = 1 << 20


def test_the_host_cannot_read_device_memory():
    ended = subprocess.run([sys.executable, "-c", READS], capture_output=True)
    assert ended.returncode == -signal.SIGSEGV
    with pytest.raises(TypeError, match="can't convert sim"):
        torch.ones(1, device="sim").numpy()


@pytest.mark.parametrize(("records", "found"), [(True, 6), (False, 0)])
def test_a_block_is_used_anew_unless_the_other_stream_was_recorded(records, found):
    side, x = torch.Stream("sim:0"), torch.full((1 << 16,), 3.0, device="sim")
    torch.sim.synchronize()
    address = x.data_ptr()
    with torch.sim.held(side):
        with side:
            y = x * 2
        if records:
            x.record_stream(side)
        del x
        z = torch.zeros(1 << 16, device="sim")
        assert (z.data_ptr() == address) is not records
        torch.sim.current_stream().synchronize()
    side.synchronize()
    with side:
        assert y.cpu()[0] == found


def test_memory_is_poison_after_its_use_and_before():
    x = torch.full((1 << 10,), 3.0, device="sim")
    del x
    y = torch.empty(1 << 10, device="sim").cpu()
    assert (y.view(torch.uint8) == 0xCB).all()


def test_pinned_memory_is_not_used_anew_while_it_is_copied():
    pinned = torch.ones(10).pin_memory()
    address = pinned.data_ptr()
    torch.sim.synchronize()
    with torch.sim.held():
        x = pinned.to("sim", non_blocking=True)
        del pinned
        assert torch.empty(10, pin_memory=True).data_ptr() != address
    assert x.sum().item() == 10


def test_memory_has_an_end():
    count = torch.sim.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match="has a capacity of"):
        torch.empty(2 << 30, dtype=torch.uint8, device="sim")
    torch.sim.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * MIB, dtype=torch.uint8, device="sim")
    torch.sim.out_of_memory_after(1)
    first = torch.empty(5, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5, device="sim")
    assert torch.empty_like(first).device.type == "sim"
    assert torch.sim.memory_stats()["num_ooms"] == count + 3


def test_a_lack_of_memory_meets_the_thread_that_asked_for_it():
    torch.sim.out_of_memory_after(0)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.empty, 5, device="sim").result().shape == (5,)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5, device="sim")


def test_what_is_cached_is_returned_where_it_is_needed():
    big = torch.empty(600 * MIB, dtype=torch.uint8, device="sim")
    del big
    assert torch.sim.memory_reserved() >= 600 * MIB
    assert torch.empty(900 * MIB, dtype=torch.uint8, device="sim").nbytes == 900 * MIB


def test_memory_in_use_is_counted():
    gc.collect()
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats()
    before, (free, total) = torch.sim.memory_allocated(), torch.sim.mem_get_info()
    x = torch.empty(MIB, device="sim")
    reserved = torch.sim.memory_reserved()
    assert torch.sim.memory_allocated() - before == 4 * MIB
    assert torch.sim.mem_get_info() == (free - 4 * MIB, total)
    del x
    assert torch.sim.memory_reserved() == reserved
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == reserved - 4 * MIB
    assert torch.sim.max_memory_allocated() - before == 4 * MIB


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library in use, by this test alone."""
    monkeypatch.setattr(fake_nvml, "_users_of_library", 0)
    fake_nvml.nvmlInit()
    return fake_nvml


def test_nothing_is_told_to_who_has_not_begun_to_use_the_library(nvml: ModuleType):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlShutdown()
    for ask in (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetPersistenceMode):
        with pytest.raises(nvml.NVMLError, match="Uninitialized"):
            ask(handle)
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetMemoryInfo(handle).total


@pytest.mark.slow
def test_processes_share_the_memory_of_a_device_until_they_die(nvml: ModuleType):
    torch.sim.empty_cache()
    free, _ = torch.sim.mem_get_info(1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"holds\n"
        assert torch.sim.mem_get_info(1)[0] == free - 300 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free - 200 * MIB, dtype=torch.uint8, device="sim:1")
        used = {
            each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(1)
        }
        assert used[other.pid] == 300 * MIB
        assert os.getpid() in used
        assert nvml.nvmlDeviceGetMemoryInfo(1).free == free - 300 * MIB
        other.kill()  # it has no time to return anything
    until(lambda: torch.sim.mem_get_info(1)[0] == free)
    assert nvml.nvmlDeviceGetMemoryInfo(1).free == free
    whole = torch.empty(free - MIB, dtype=torch.uint8, device="sim:1")
    assert other.pid not in [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(1)]
    del whole
    torch.sim.empty_cache()


@pytest.mark.slow
def test_a_process_sees_the_devices_that_it_may_use():
    uuid = fake_nvml.nvmlDeviceGetUUID(2)
    code = """
import torch
assert not torch.sim.is_initialized()
print(torch.sim.device_count(), *(torch.sim.get_device_properties(i).uuid for i in range(2)))
assert not torch.sim.is_initialized()
torch.ones(1, device="sim:0")
assert torch.sim.is_initialized()
"""
    environment = {**os.environ, "SIM_VISIBLE_DEVICES": f"{uuid},0,9,1"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    uuids = [fake_nvml.nvmlDeviceGetUUID(i).removeprefix("GPU-") for i in (2, 0)]
    assert found.stdout.split() == ["2", *uuids]
