from pathlib import Path

import pytest

from workers.devices import Gpu, find_host


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
    import workers.devices

    monkeypatch.setattr(workers.devices, "_find_gpus", lambda: [gpu(0), gpu(1), gpu(2)])
    assert [g.index for g in find_host("2,0").gpus] == [2, 0]
    assert [g.index for g in find_host("GPU-1").gpus] == [1]
    assert find_host("").gpus == ()
    assert [g.index for g in find_host("1,7,2").gpus] == [1]
    assert len(find_host(None).gpus) == 3


def test_gpu_that_fails_is_left_out_and_the_others_stay(monkeypatch: pytest.MonkeyPatch):
    import pynvml

    import workers.devices

    def read(_: object, index: int) -> Gpu:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu(index)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(workers.devices, "_gpu", read)
    assert [g.index for g in find_host(None).gpus] == [1]
