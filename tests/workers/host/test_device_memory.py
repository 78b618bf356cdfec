"""Memory of this host and of GPUs that a fake driver describes."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil

from inferpool.workers.host.device_memory import HOST, DeviceMemory
from inferpool.workers.host.engine import Vitals
from inferpool.workers.host.gpus import Gpu
from tests.fakes import FakeWorker

MIB = 1 << 20


class MemoryNvmlError(Exception):
    """The error that the fake driver raises."""


class MemoryNvml:
    """A driver of some GPUs, each with 1000 MiB."""

    NVMLError = MemoryNvmlError

    def __init__(self) -> None:
        self.processes: dict[str, dict[int, int | None]] = {"GPU-a": {}, "GPU-b": {}}
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.processes:
            raise MemoryNvmlError("it is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(free=1000 * MIB - sum(filter(None, self.processes[handle].values())))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        each = self.processes[handle].items()
        return [SimpleNamespace(pid=pid, usedGpuMemory=num) for pid, num in each]


class OwnWorker(FakeWorker):
    """A worker that is this process, or another one."""

    pid = os.getpid()

    def vitals(self) -> Vitals:
        return Vitals(
            pid=self.pid, rss_bytes=7, last_beat_age_s=0.0, num_batches=0, last_answer_age_s=0.0
        )


def gpu(uuid: str, *, is_unified: bool = False) -> Gpu:
    return Gpu(
        index=0, uuid=uuid, name="x", memory_bytes=1000 * MIB, cpus=(), is_unified=is_unified
    )


def test_the_free_memory_of_each_gpu_is_told_and_that_of_unified_ones_is_the_hosts():
    nvml = MemoryNvml()
    nvml.processes["GPU-a"] = {1: 300 * MIB}
    memory = DeviceMemory([gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-u", is_unified=True)], nvml)
    free = memory.free()
    assert free.pop(HOST) <= psutil.virtual_memory().total
    assert free == {"GPU-a": 700 * MIB, "GPU-b": 1000 * MIB}
    assert nvml.num_open == 0


def test_a_gpu_that_the_driver_cannot_ask_is_left_out_and_the_log_says_so(caplog):
    memory = DeviceMemory([gpu("GPU-a"), gpu("GPU-lost")], MemoryNvml())
    assert set(memory.free()) == {HOST, "GPU-a"}
    assert "GPU-lost is not known: NVML says it is lost" in caplog.text


async def test_the_memory_that_a_worker_has_of_each_gpu_is_told():
    nvml = MemoryNvml()
    nvml.processes["GPU-a"] = {os.getpid(): 300 * MIB, 1: 5}
    nvml.processes["GPU-b"] = {os.getpid(): None}
    used = DeviceMemory([gpu("GPU-a"), gpu("GPU-b")], nvml).used_by(OwnWorker())
    assert used.pop(HOST) > MIB
    assert used == {"GPU-a": 300 * MIB, "GPU-b": 0}


async def test_a_worker_that_has_ended_has_nothing_even_if_nobody_has_waited_for_it():
    memory = DeviceMemory((), None)
    worker = OwnWorker()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
        worker.pid = process.pid
        assert memory.used_by(worker)[HOST] > 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert memory.used_by(worker) == {}
    assert memory.used_by(worker) == {}
