from pathlib import Path

import pytest

from inferpool.workers.host.devices import DeviceError, Host, find_host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.placing import PlacementRequest, place
from tests.fake_driver.driver import MISMATCH, FakeDriver, h100, mig_slice, t4

ALIKE = {"GPU-a0": h100(), "GPU-a1": h100(), "GPU-b": h100()}
DIFFERENT = {"GPU-slow": t4(), "GPU-fast": h100(), "GPU-last": t4()}
BOTH_ORDERS = """
import ctypes, os
from inferpool.workers.host.devices import find_host

cuda = ctypes.CDLL("libcuda.so.1")
answer = []
for visible, order in {cases}:
    for name, text in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text
    cuda.cuInit(0)
    count, uuid = ctypes.c_int(), ctypes.create_string_buffer(96)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    shown = []
    for number in range(count.value):
        cuda.cuDeviceGetUuid_v2(uuid, number)
        shown.append(uuid.value.decode())
    host = find_host(visible, order or "")
    answer.append((shown, [gpu.uuid for gpu in host.gpus], host.problem))
"""
"""Asks CUDA and us which GPUs a process would see, for each CUDA_VISIBLE_DEVICES and order."""


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [("cpu.max", "150000 100000", 1), ("cpu.max", "max 100000", None), ("other", "", None)],
)
def test_quota_of_the_cgroup_is_read(tmp_path: Path, name: str, text: str, cores: int | None):
    (tmp_path / name).write_text(text)
    host = find_host(None, cgroup=tmp_path)
    assert host.num_cores == (cores or len(host.cpus))


def orders(driver: FakeDriver, *cases: tuple[str | None, str | None]) -> list[list[object]]:
    """Return, for each case, the GPUs that CUDA shows, those that we choose, and our problem."""
    return list(driver.ask(BOTH_ORDERS.replace("{cases}", repr(cases))))


def test_visible_devices_choose_as_cuda_does(tmp_path: Path):
    cases = {
        None: ["GPU-a0", "GPU-a1", "GPU-b"],
        "2,0": ["GPU-b", "GPU-a0"],
        "GPU-b": ["GPU-b"],
        "GPU-a1,GPU-b": ["GPU-a1", "GPU-b"],
        "1,7,2": ["GPU-a1"],
        "GPU-a": [],  # begins the UUIDs of two
        "-1": [],
        "": [],
    }
    found = orders(FakeDriver(tmp_path, ALIKE), *((visible, None) for visible in cases))
    assert [ours for _, ours, _ in found] == list(cases.values())
    assert [cudas for cudas, _, _ in found if cudas] == [ours for ours in cases.values() if ours]
    problems = dict(zip(cases, (problem for *_, problem in found), strict=True))
    assert "'7' is none of its GPUs" in str(problems.pop("1,7,2"))
    assert "'GPU-a' is none of its GPUs" in str(problems.pop("GPU-a"))
    assert set(problems.values()) == {""}


def test_indices_mean_what_cuda_means_or_nothing_at_all(tmp_path: Path):
    by_bus, unset, uuids, every = orders(
        FakeDriver(tmp_path, DIFFERENT),
        ("0", "PCI_BUS_ID"),
        ("0", None),
        ("GPU-slow,GPU-fast", None),
        ("0,1,2", "FASTEST_FIRST"),
    )
    assert by_bus == [["GPU-slow"], ["GPU-slow"], ""]
    assert unset[:2] == [["GPU-fast"], []]
    assert "or set CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(unset[2])
    assert uuids[0] == uuids[1] == ["GPU-slow", "GPU-fast"]
    assert every[2] == ""
    assert sorted(every[0]) == sorted(every[1]) == sorted(DIFFERENT)  # all of them are meant


def test_service_does_not_fall_back_to_cpus_from_gpus_that_were_named(tmp_path: Path):
    host = FakeDriver(tmp_path, DIFFERENT).host(CUDA_VISIBLE_DEVICES="0")
    for devices in ("auto", "cuda"):
        with pytest.raises(DeviceError, match=r"several kinds of GPU .*name UUIDs"):
            place(host, PlacementRequest(devices=devices))
    assert place(host, PlacementRequest(devices="cpu"))


def test_all_chooses_every_gpu(tmp_path: Path):
    host = FakeDriver(tmp_path, ALIKE).host(CUDA_VISIBLE_DEVICES="all")
    assert [gpu.uuid for gpu in host.gpus] == list(ALIKE)
    assert host.problem == ""


def test_kinds_of_accelerator_are_kept_apart():
    gpu = Gpu(index=0, uuid="X-0", name="other", memory_bytes=1 << 30, cpus=(), kind="other")
    host = Host(cpus=(0, 1), num_cores=2, gpus=(gpu,))
    for devices in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="there is no cuda"):
            place(host, PlacementRequest(devices=devices))


def test_name_that_comes_twice_leaves_no_gpu(tmp_path: Path):
    host = FakeDriver(tmp_path, ALIKE).host(CUDA_VISIBLE_DEVICES="1,GPU-a1")
    assert host.gpus == ()
    assert "it names a GPU twice" in host.problem


def test_slices_stand_for_a_gpu_that_is_cut(tmp_path: Path):
    slices = {name: mig_slice("GPU-cut") for name in ("MIG-a", "MIG-b", "MIG-c")}
    driver = FakeDriver(tmp_path, {"GPU-whole": h100(), "GPU-cut": h100(), **slices})
    host = driver.host()
    assert list(map(str, host.gpus)) == [
        "cuda:0 (NVIDIA H100 80GB HBM3, 80 GiB)",
        *(f"{name} (NVIDIA H100 80GB HBM3 MIG 1g.10gb, 10 GiB)" for name in slices),
    ]
    for visible in ("1", "GPU-cut", "MIG-a,MIG-b,MIG-c"):
        chosen = driver.host(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
        assert [gpu.uuid for gpu in chosen.gpus] == list(slices)
    by_index = driver.host(CUDA_VISIBLE_DEVICES="1")
    assert "several kinds of GPU" in by_index.problem  # CUDA shows whole GPUs or a slice
    of = {
        each: [p.visible for p in place(host, PlacementRequest(devices=each))]
        for each in ("cuda:1", "MIG-b", "auto")
    }
    each_slice = [("MIG-a",), ("MIG-b",), ("MIG-c",)]
    assert of == {
        "cuda:1": each_slice,
        "MIG-b": [("MIG-b",)],
        "auto": [("GPU-whole",), *each_slice],
    }
    with pytest.raises(DeviceError, match=r"cannot be split over MIG slices.*MIG-a"):
        place(host, PlacementRequest(split="pipeline", devices="cuda:1"))


def test_driver_that_does_not_work_is_told_from_none(tmp_path: Path):
    broken = FakeDriver(tmp_path, ALIKE, nvmlInitWithFlags=MISMATCH)
    host = broken.host()
    assert host.gpus == ()
    assert "NVML/RM version mismatch; the driver was updated" in host.problem
    with pytest.raises(DeviceError, match='"cuda", but no GPU can be used: NVML says RM has'):
        place(host, PlacementRequest(devices="cuda"))
    assert {p.devices for p in place(host, PlacementRequest())} == {("cpu",)}
    with pytest.raises(DeviceError, match="version mismatch"):
        place(broken.host(CUDA_VISIBLE_DEVICES="0"), PlacementRequest())
    assert broken.host(LD_LIBRARY_PATH="").problem == ""
