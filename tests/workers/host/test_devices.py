from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.workers.host.devices import DeviceError, Gpu, find_host, read_gpus
from inferpool.workers.host.placing import PlacementRequest, place

Handle = dict[str, Any]


def gpu(index: int, cpus: tuple[int, ...] = ()) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="H100", memory_bytes=80 << 30, cpus=cpus)


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [("cpu.max", "150000 100000", 1), ("cpu.max", "max 100000", None), ("other", "", None)],
)
def test_quota_of_the_cgroup_is_read(tmp_path: Path, name: str, text: str, cores: int | None):
    (tmp_path / name).write_text(text)
    host = find_host(None, cgroup=tmp_path)
    assert host.num_cores == (cores or len(host.cpus))


def test_visible_devices_choose_as_cuda_does(monkeypatch: pytest.MonkeyPatch):
    import inferpool.workers.host.devices

    monkeypatch.setattr(
        inferpool.workers.host.devices, "_find_gpus", lambda: [gpu(0), gpu(1), gpu(2)]
    )
    assert [g.index for g in find_host("2,0").gpus] == [2, 0]
    assert [g.index for g in find_host("GPU-1").gpus] == [1]
    assert find_host("").gpus == ()
    assert [g.index for g in find_host("1,7,2").gpus] == [1]
    assert len(find_host(None).gpus) == 3


class FakeNvmlWithGpus:
    """A fake of pynvml, for GPUs that the test describes."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    NVMLError = LookupError

    def __init__(self, gpus: Sequence[Handle], links: Set[tuple[int, int]]) -> None:
        self._gpus = [{"number": number, **each} for number, each in enumerate(gpus)]
        self._answers = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: len(gpus),
            "DeviceGetHandleByIndex": self._handle,
            "DeviceGetUUID": lambda gpu: gpu.get("uuid", f"GPU-{gpu.get('number')}"),
            "DeviceGetName": lambda gpu: gpu.get("name", "H100"),
            "DeviceGetMemoryInfo": self._memory,
            "DeviceGetMigMode": lambda gpu: ("slices" in gpu, "slices" in gpu),
            "DeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "DeviceGetMigDeviceHandleByIndex": self._slice,
            "DeviceGetCpuAffinity": lambda gpu, words: [0b1111],
            "DeviceGetP2PStatus": lambda one, other, index: (
                0 if (one["number"], other["number"]) in links else 4
            ),
            "DeviceGetTopologyCommonAncestor": lambda one, other: (
                10 if one["number"] // 2 == other["number"] // 2 else 50
            ),
        }

    def __getattr__(self, name: str) -> Callable[..., object]:
        return self._answers[name.removeprefix("nvml")]

    def _handle(self, index: int) -> Handle:
        if "is_lost" in self._gpus[index]:
            raise self.NVMLError("GPU is lost")
        return self._gpus[index]

    def _memory(self, gpu: Handle) -> SimpleNamespace:
        if "slices" in gpu:
            raise self.NVMLError("Insufficient Permissions")  # as in a container
        return SimpleNamespace(total=gpu.get("gib", 80) << 30)

    def _slice(self, gpu: Handle, number: int) -> Handle:
        if number >= len(gpu["slices"]):
            raise self.NVMLError("Not Found")
        return {"uuid": gpu["slices"][number], "name": "H100 MIG 1g.10gb", "gib": 10}


def read(*gpus: Handle, links: Set[tuple[int, int]] = frozenset()) -> list[Gpu]:
    return read_gpus(FakeNvmlWithGpus(gpus, links))


def test_gpu_that_fails_is_left_out_and_the_others_stay():
    assert [g.index for g in read({"is_lost": True}, {})] == [1]


def test_gpus_know_who_is_near_them():
    zero, one, *_ = read({}, {}, {}, links={(0, 2)})
    assert zero.distances == {"GPU-1": 10, "GPU-2": 0}
    assert one.distances == {"GPU-0": 10, "GPU-2": 50}
    assert zero.cpus == (0, 1, 2, 3)


def test_slices_stand_for_a_gpu_that_is_cut(monkeypatch: pytest.MonkeyPatch):
    import inferpool.workers.host.devices

    found = read({}, {"slices": ["MIG-a", "MIG-b"]})
    assert [str(g) for g in found] == [
        "cuda:0 (H100, 80 GiB)",
        "MIG-a (H100 MIG 1g.10gb, 10 GiB)",
        "MIG-b (H100 MIG 1g.10gb, 10 GiB)",
    ]
    monkeypatch.setattr(inferpool.workers.host.devices, "_find_gpus", lambda: found)
    for visible in ("1", "GPU-1", "MIG-a,MIG-b"):
        assert [g.uuid for g in find_host(visible).gpus] == ["MIG-a", "MIG-b"]
    host = find_host(None)
    assert [p.visible for p in place(host, PlacementRequest(devices="cuda:1"))] == [
        ("MIG-a",),
        ("MIG-b",),
    ]
    assert [p.visible for p in place(host, PlacementRequest(devices="MIG-b"))] == [("MIG-b",)]
    assert [p.visible for p in place(host, PlacementRequest())] == [
        ("GPU-0",),
        ("MIG-a",),
        ("MIG-b",),
    ]
    with pytest.raises(DeviceError, match=r"cannot be split over MIG slices.*MIG-a"):
        place(host, PlacementRequest(split="pipeline", devices="cuda:1"))
