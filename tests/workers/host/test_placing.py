from dataclasses import replace
from typing import Any

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.placing import PlacementRequest, place, share_cores


def gpu(index: int, cpus: tuple[int, ...] = ()) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="H100", memory_bytes=80 << 30, cpus=cpus)


def placed(host: Host, **request: Any) -> list[Placement]:
    return place(host, PlacementRequest(**request))


TWO_GPUS = Host(
    cpus=tuple(range(16)),
    num_cores=16,
    gpus=(gpu(0, tuple(range(8))), gpu(1, tuple(range(8, 16)))),
)
TWO_CORES = Host(cpus=(0, 1), num_cores=2)


def test_auto_puts_one_replica_on_each_gpu_near_its_cores():
    placements = placed(TWO_GPUS)
    assert [placement.visible for placement in placements] == [("GPU-0",), ("GPU-1",)]
    assert [placement.cpus for placement in placements] == [tuple(range(8)), tuple(range(8, 16))]
    assert {placement.devices for placement in placements} == {("cuda:0",)}
    assert sum(placement.num_threads for placement in placements) == 16


def test_more_replicas_than_gpus_go_round():
    placements = placed(TWO_GPUS, devices="cuda:1", replicas=2)
    assert [placement.visible for placement in placements] == [("GPU-1",), ("GPU-1",)]
    assert [placement.num_threads for placement in placements] == [4, 4]


def test_without_gpus_each_core_gets_a_replica_and_threads_add_up_to_the_cores():
    placements = placed(TWO_CORES)
    assert [placement.num_threads for placement in placements] == [1, 1]
    assert {placement.devices for placement in placements} == {("cpu",)}


def test_large_host_has_groups_of_cores():
    host = Host(cpus=tuple(range(64)), num_cores=64)
    placements = placed(host, devices="cpu")
    assert len(placements) == 8
    assert [len(placement.cpus) for placement in placements] == [8] * 8
    assert len({cpu for placement in placements for cpu in placement.cpus}) == 64


def test_quota_counts_rather_than_cores():
    host = Host(cpus=tuple(range(64)), num_cores=3)
    placements = placed(host)
    assert [placement.num_threads for placement in placements] == [1, 1, 1]
    assert {placement.cpus for placement in placements} == {()}


@pytest.mark.parametrize(
    ("host", "devices", "message"),
    [
        (TWO_GPUS, "cuda:2", "no cuda:2 on this host: it has cuda:0"),
        (TWO_CORES, "cuda", "this host has no GPU"),
        (TWO_CORES, "tpu", 'say "auto"'),
    ],
)
def test_device_that_is_not_there_is_named(host: Host, devices: str, message: str):
    with pytest.raises(DeviceError, match=message):
        placed(host, devices=devices)


@pytest.mark.parametrize("num_cores", [1, 3, 12, 15, 31, 96])
def test_threads_add_up_to_the_cores(num_cores: int):
    host = Host(cpus=tuple(range(num_cores)), num_cores=num_cores)
    placements = placed(host, devices="cpu")
    assert sum(placement.num_threads for placement in placements) == num_cores


def gpus(num: int) -> Host:
    return Host(cpus=tuple(range(16)), num_cores=16, gpus=tuple(map(gpu, range(num))))


def visible(host: Host, **request: Any) -> list[tuple[str, ...]]:
    return [placement.visible for placement in placed(host, **request)]


def test_split_replicas_lie_side_by_side_on_groups_of_gpus():
    for request in ({"replicas": 2}, {"ranks": 2}):
        first, second = placed(gpus(4), split="pipeline", **request)
        assert [first.visible, second.visible] == [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")]
        assert first.devices == second.devices == ("cuda:0", "cuda:1")
        assert (first.split, first.num_threads) == ("pipeline", 4)
    assert visible(gpus(4), split="tensor") == [("GPU-0", "GPU-1", "GPU-2", "GPU-3")]
    named = visible(gpus(4), split="tensor", devices="cuda:3,1,0,2", ranks=2)
    assert named == [("GPU-3", "GPU-1"), ("GPU-0", "GPU-2")]


def test_ranks_share_a_gpu_only_where_it_is_named_for_each():
    (shared,) = placed(gpus(1), split="pipeline", devices="cuda:0,0")
    assert (shared.devices, shared.visible) == (("cuda:0", "cuda:0"), ("GPU-0",))
    with pytest.raises(DeviceError, match=r'needs 2 GPUs \(2\), and there are 1 .*"cuda:0,0"'):
        placed(gpus(1), split="pipeline")
    with pytest.raises(
        DeviceError, match=r"needs 6 GPUs \(3 replicas on 2 each\), and there are 4"
    ):
        placed(gpus(4), split="tensor", replicas=3)
    with pytest.raises(DeviceError, match="over GPUs or over CPUs"):
        placed(gpus(2), split="tensor", devices="cuda,cpu")


def test_on_cpus_replicas_times_ranks_times_threads_make_the_cores():
    (one,) = placed(TWO_CORES, split="pipeline")
    assert (one.devices, one.num_threads, one.cpus) == (("cpu", "cpu"), 1, ())
    host = Host(cpus=tuple(range(16)), num_cores=16)
    first, second = placed(host, split="tensor", replicas=2)
    assert (first.num_threads, first.cpus, second.cpus) == (4, host.cpus[:8], host.cpus[8:])
    ranks = [second.for_rank(rank) for rank in range(2)]
    assert [rank.cpus for rank in ranks] == [host.cpus[8:12], host.cpus[12:]]
    assert {rank.devices for rank in ranks} == {("cpu",)}


def test_a_rank_beside_a_gpu_keeps_all_that_is_visible_and_near():
    (placement,) = placed(TWO_GPUS, split="pipeline")
    rank = placement.for_rank(1)
    assert (rank.devices, rank.visible) == (("cuda:1",), ("GPU-0", "GPU-1"))
    assert (rank.cpus, rank.num_threads, rank.split) == (tuple(range(16)), 8, "pipeline")
    assert (str(placement), str(rank)) == ("cuda:GPU-0+cuda:GPU-1", "cuda:GPU-1")


def test_replicas_go_to_gpus_and_cpus_in_the_order_named():
    mixed = placed(TWO_GPUS, devices="cuda:1,cpu")
    assert [(p.devices, p.visible) for p in mixed] == [(("cuda:0",), ("GPU-1",)), (("cpu",), ())]
    assert [placement.num_threads for placement in mixed] == [8, 8]
    three = placed(TWO_GPUS, devices="GPU-0,cpu", replicas=3)
    assert [placement.visible for placement in three] == [("GPU-0",), (), ("GPU-0",)]
    assert len(placed(TWO_CORES, devices="cpu,cpu,cpu")) == 3


def test_groups_are_of_gpus_that_are_near_each_other_unless_they_are_named():
    near = {0: 2, 2: 0, 1: 3, 3: 1}
    host = replace(
        gpus(4),
        gpus=tuple(replace(gpu(i), distances={f"GPU-{near[i]}": 0}) for i in range(4)),
    )
    for devices in ("auto", "cuda"):
        near_ones = visible(host, split="pipeline", ranks=2, devices=devices)
        assert near_ones == [("GPU-0", "GPU-2"), ("GPU-1", "GPU-3")]
    named = visible(host, split="pipeline", ranks=2, devices="cuda:0,1,2,3")
    assert named == [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3")]


def test_processes_that_share_a_gpu_share_its_memory():
    three = placed(TWO_GPUS, replicas=3)
    assert [placement.visible for placement in three] == [("GPU-0",), ("GPU-1",), ("GPU-0",)]
    share = 1 / 2 - 800 / (80 << 10)  # of 80 GiB, less 800 MiB for what CUDA takes
    assert [placement.memory_fraction for placement in three] == [share, None, share]
    (ranks,) = placed(gpus(1), split="pipeline", devices="cuda:0,0")
    assert ranks.for_rank(1).memory_fraction == share
    set_by_user = placed(gpus(1), replicas=2, memory_fraction=0.4, devices="cuda:0,cpu")
    assert [placement.memory_fraction for placement in set_by_user] == [0.4, None]
    with pytest.raises(DeviceError, match=r"gpu_memory_fraction = 0.6 for each of 2 .*at most 0.5"):
        placed(gpus(1), replicas=2, memory_fraction=0.6)
    with pytest.raises(DeviceError, match=r"at most 0\.142"):
        placed(gpus(1), replicas=7, memory_fraction=0.143)


def test_models_share_out_the_cores():
    host = Host(cpus=tuple(range(8)), num_cores=8)
    shares = share_cores(host, [None, None, None])
    assert [share.cpus for share in shares] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    placements = [placement for share in shares for placement in placed(share)]
    assert sum(placement.num_threads for placement in placements) == 8


def test_models_without_a_setting_share_the_cores_that_the_others_leave():
    host = Host(cpus=tuple(range(8)), num_cores=8)
    shares = share_cores(host, [None, 4, None])
    assert [share.cpus for share in shares] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    assert [share.num_cores for share in share_cores(host, [16, None])] == [16, 1]


def test_more_models_than_cores_take_one_each():
    shares = share_cores(TWO_CORES, [None] * 6)
    placements = [placement for share in shares for placement in placed(share)]
    assert [placement.num_threads for placement in placements] == [1] * 6
    assert {placement.cpus for placement in placements} == {()}


def test_model_that_is_alone_has_all_cores():
    assert share_cores(TWO_CORES, [None]) == share_cores(TWO_CORES, [1]) == [TWO_CORES]


def test_models_on_gpus_share_out_threads_and_stay_near_their_gpus():
    first, second = share_cores(TWO_GPUS, [None, None])
    placements = [*placed(first), *placed(second)]
    assert sum(placement.num_threads for placement in placements) == 16
    assert {placement.cpus for placement in placements} == {tuple(range(8)), tuple(range(8, 16))}
