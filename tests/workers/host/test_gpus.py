import os
from pathlib import Path

import psutil
import pytest

from inferpool.workers.host.devices import Host
from inferpool.workers.host.placing import PlacementRequest, place
from tests.fake_driver.driver import (
    IS_LOST,
    NO_PERMISSION,
    NOT_LOADED,
    NOT_SUPPORTED,
    FakeDriver,
    h100,
    mig_slice,
)

READ = """
import pathlib, pynvml
from inferpool.workers.host.gpus import DriverError, read_gpus

try:
    read_gpus(pynvml, sys=pathlib.Path("{folder}"))
    answer = "no GPU"
except DriverError as error:
    answer = str(error)
"""


HASTY = """
import pynvml
from inferpool.workers.host import devices, nvml

found, state = devices.find_host(None, answer_s=0.1), nvml.read_nvml(pynvml, answer_s=0.1)
answer = [found.problem, state.problem]
"""


def uuids(host: Host) -> list[str]:
    return [gpu.uuid for gpu in host.gpus]


def test_gpus_know_who_is_near_them(tmp_path: Path):
    pair = {"GPU-a": h100(cpus=0b1111, nvlink="GPU-c"), "GPU-b": h100(cpus=0b110000)}
    host = FakeDriver(tmp_path, {**pair, "GPU-c": h100(socket=1, nvlink="GPU-a")}).host()
    first, second, third = host.gpus
    assert (first.index, first.name, first.memory_bytes) == (0, "NVIDIA H100 80GB HBM3", 80 << 30)
    assert (first.cpus, second.cpus) == ((0, 1, 2, 3), (4, 5))
    assert first.distances == {"GPU-b": 30, "GPU-c": 0}
    assert third.distances == {"GPU-a": 0, "GPU-b": 50}


@pytest.mark.parametrize(
    "memory", [{"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}, {"memory": 0}], ids=["refused", "none"]
)
def test_gpu_without_memory_of_its_own_has_that_of_the_host(tmp_path: Path, memory: dict[str, int]):
    (gpu,) = FakeDriver(tmp_path, {"GPU-a": h100(name="NVIDIA GB10", **memory)}).host().gpus
    assert gpu.is_unified
    assert gpu.memory_bytes == psutil.virtual_memory().total
    assert "GiB shared with the host" in str(gpu)
    host = Host(cpus=(0, 1), num_cores=2, gpus=(gpu,))
    two = place(host, PlacementRequest(replicas=2))
    assert [p.visible for p in two] == [("GPU-a",)] * 2
    assert all(p.memory_fraction and 0.2 < p.memory_fraction <= 0.5 for p in two)


def test_gpu_that_fails_is_left_out_and_the_others_stay(tmp_path: Path, capfd):
    lost = h100(nvmlDeviceGetHandleByIndex_v2=IS_LOST)
    others = {"GPU-b": h100(), "GPU-foreign": h100(nvmlDeviceGetHandleByIndex_v2=NO_PERMISSION)}
    host = FakeDriver(tmp_path, {"GPU-a": lost, **others, "GPU-c": h100()}).host()
    assert [(gpu.index, gpu.uuid) for gpu in host.gpus] == [(1, "GPU-b"), (3, "GPU-c")]
    said = capfd.readouterr().err
    assert "cuda:0 is left out: NVML says" in said
    assert "cuda:2" not in said  # it belongs to another job


def test_whole_gpu_whose_memory_a_container_may_not_ask_has_slices_all_the_same(tmp_path: Path):
    cut = h100(nvmlDeviceGetMemoryInfo=NO_PERMISSION)
    slices = {f"MIG-{n}": mig_slice("GPU-a") for n in range(4)}  # their numbers have a gap
    host = FakeDriver(tmp_path, {"GPU-a": cut, **slices}).host()
    assert uuids(host) == list(slices)
    assert {gpu.sliced_from for gpu in host.gpus} == {"GPU-a"}


def test_driver_that_is_not_loaded_is_a_problem_only_where_there_is_a_gpu(tmp_path: Path):
    driver = FakeDriver(tmp_path, {"GPU-a": h100()}, nvmlInitWithFlags=NOT_LOADED)

    def problem(**devices: tuple[str, str]) -> str:
        for name, (vendor, kind) in devices.items():
            (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
            (tmp_path / "sys/bus/pci/devices" / name / "vendor").write_text(f"{vendor}\n")
            (tmp_path / "sys/bus/pci/devices" / name / "class").write_text(f"{kind}\n")
        return str(driver.ask(READ.format(folder=tmp_path / "sys")))

    assert problem() == "no GPU"
    assert problem(audio=("0x10de", "0x040300"), other=("0x1002", "0x030000")) == "no GPU"
    assert "NVML says Driver Not Loaded; `modprobe nvidia`" in problem(gpu=("0x10de", "0x030200"))


@pytest.mark.parametrize("hangs", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo"])
def test_driver_that_never_answers_is_waited_for_only_so_long(tmp_path: Path, hangs: str):
    gpus = {"GPU-a": h100(hangs=hangs)}
    driver = FakeDriver(tmp_path, gpus, hangs=hangs)
    assert driver.ask(HASTY) == ["no GPU can be used: the driver has not answered in 0.1 s"] * 2


def test_finding_gpus_leaves_cuda_alone(tmp_path: Path):
    driver = FakeDriver(tmp_path, {"GPU-a": h100()})
    assert uuids(driver.host()) == ["GPU-a"]
    functions = [call.function for call in driver.calls()]
    assert functions[0] == "nvmlInitWithFlags"
    assert functions[-1] == "nvmlShutdown"
    assert not [name for name in functions if name.startswith("cu")]
    assert os.getpid() not in {call.pid for call in driver.calls()}
