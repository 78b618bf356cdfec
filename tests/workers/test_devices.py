from pathlib import Path

import pytest

from workers.devices import DeviceError, Gpu, Host, find_host, place


def gpu(index: int, cpus: tuple[int, ...] = ()) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="H100", memory_bytes=80 << 30, cpus=cpus)


TWO_GPUS = Host(
    cpus=tuple(range(16)),
    num_cores=16,
    gpus=(gpu(0, tuple(range(8))), gpu(1, tuple(range(8, 16)))),
)
TWO_CORES = Host(cpus=(0, 1), num_cores=2)


def test_auto_puts_one_replica_on_each_gpu_near_its_cores():
    placements = place(TWO_GPUS, devices="auto", replicas=None, threads=None)
    assert [placement.visible for placement in placements] == [("GPU-0",), ("GPU-1",)]
    assert [placement.cpus for placement in placements] == [tuple(range(8)), tuple(range(8, 16))]
    assert {placement.devices for placement in placements} == {("cuda:0",)}
    assert sum(placement.num_threads for placement in placements) == 16


def test_more_replicas_than_gpus_go_round():
    placements = place(TWO_GPUS, devices="cuda:1", replicas=2, threads=None)
    assert [placement.visible for placement in placements] == [("GPU-1",), ("GPU-1",)]
    assert [placement.num_threads for placement in placements] == [8, 8]


def test_without_gpus_each_core_gets_a_replica_and_threads_add_up_to_the_cores():
    placements = place(TWO_CORES, devices="auto", replicas=None, threads=None)
    assert [placement.num_threads for placement in placements] == [1, 1]
    assert {placement.devices for placement in placements} == {("cpu",)}


def test_large_host_has_groups_of_cores():
    host = Host(cpus=tuple(range(64)), num_cores=64)
    placements = place(host, devices="cpu", replicas=None, threads=None)
    assert len(placements) == 8
    assert [len(placement.cpus) for placement in placements] == [8] * 8
    assert len({cpu for placement in placements for cpu in placement.cpus}) == 64


def test_quota_counts_rather_than_cores():
    host = Host(cpus=tuple(range(64)), num_cores=3)
    placements = place(host, devices="auto", replicas=None, threads=None)
    assert [placement.num_threads for placement in placements] == [1, 1, 1]
    assert {placement.cpus for placement in placements} == {()}


@pytest.mark.parametrize(
    ("host", "devices", "message"),
    [
        (TWO_GPUS, "cuda:2", "no cuda:2 on this host: it has cuda:0"),
        (TWO_CORES, "cuda", "this host has no CUDA device"),
        (TWO_CORES, "tpu", 'say "auto"'),
    ],
)
def test_device_that_is_not_there_is_named(host: Host, devices: str, message: str):
    with pytest.raises(DeviceError, match=message):
        place(host, devices=devices, replicas=None, threads=None)


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


@pytest.mark.parametrize("num_cores", [1, 3, 12, 15, 31, 96])
def test_threads_add_up_to_the_cores(num_cores: int):
    host = Host(cpus=tuple(range(num_cores)), num_cores=num_cores)
    placements = place(host, devices="cpu", replicas=None, threads=None)
    assert sum(placement.num_threads for placement in placements) == num_cores


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
