"""Replicas that are spread over hosts: which ranks go where, and how they follow the hosts."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from inferpool.service.catalog.plans import HostPlans, place_text
from inferpool.service.catalog.spreading import SpreadPlan, SpreadPlanner
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.placing import PlacementRequest
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from tests.fakes import ref_to
from tests.service.catalog.test_hosts import Hosted
from tests.service.pools import until

CPU = Host(cpus=(0, 1), num_cores=2)


def spread(num: int, **changes: Any) -> ModelSettings:
    base = {"source": "torchvision:resnet18", "placement": "pipeline", "devices_per_replica": num}
    return ModelSettings(**{**base, "spread": True, **changes})


def with_gpus(name: str, num: int) -> Host:
    gpus = tuple(
        Gpu(index=index, uuid=f"GPU-{name}{index}", name="H100", memory_bytes=80 << 30, cpus=())
        for index in range(num)
    )
    return Host(cpus=tuple(range(8)), num_cores=8, gpus=gpus)


def planned_on(
    hosts: Mapping[str, Host], num: int, taken: Sequence[SpreadPlan] = (), **changes: Any
) -> list[SpreadPlan]:
    request = PlacementRequest(split="pipeline", ranks=num, **changes)
    model = ModelConfig(name="m", source="s")
    configs = [
        WorkerConfig(model=model, placement=plan.placement, host=plan.host, shares=plan.shares)
        for plan in taken
    ]
    return SpreadPlanner(request, hosts, configs).plan()


def sizes(plan: SpreadPlan) -> list[tuple[str, int]]:
    return [(share.host, share.placement.num_ranks) for share in plan.shares]


def test_a_replica_takes_as_few_hosts_as_it_can_and_no_device_twice():
    hosts = {"a": with_gpus("a", 1), "b": with_gpus("b", 4), "c": with_gpus("c", 2)}
    first, second = planned_on(hosts, 3)
    assert (first.host, first.shares) == ("b", ())
    assert first.placement.visible == ("GPU-b0", "GPU-b1", "GPU-b2")
    assert sizes(second) == [("c", 2), ("a", 1)]
    assert planned_on(hosts, 3, [first, second]) == []
    (again,) = planned_on(hosts, 3, [first])
    assert again == second
    (large,) = planned_on(hosts, 5)
    assert sizes(large) == [("b", 4), ("a", 1)], "c stays whole for others"


def test_each_host_sees_its_own_devices_and_people_see_all():
    (plan,) = planned_on({"a": with_gpus("a", 2), "b": with_gpus("b", 1)}, 3)
    assert plan.placement.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert plan.placement.names == ["cuda:GPU-a0", "cuda:GPU-a1", "cuda:GPU-b0"]
    lead, follower = (share.placement for share in plan.shares)
    assert (lead.devices, lead.visible) == (("cuda:0", "cuda:1"), ("GPU-a0", "GPU-a1"))
    assert (follower.devices, follower.visible) == (("cuda:0",), ("GPU-b0",))
    assert (lead.num_threads, follower.num_threads) == (4, 8)


def test_the_cpus_of_a_host_are_one_device_unless_more_are_named():
    hosts = {"a": CPU, "b": CPU}
    (plan,) = planned_on(hosts, 2)
    assert sizes(plan) == [("a", 1), ("b", 1)]
    assert plan.placement.devices == ("cpu", "cpu")
    assert planned_on({"a": CPU}, 2) == []
    (alone,) = planned_on({"a": CPU}, 2, devices="cpu,cpu")
    assert (alone.host, alone.shares) == ("a", ())


def test_cpus_are_left_alone_where_there_are_gpus():
    hosts = {"a": with_gpus("a", 1), "b": CPU}
    assert planned_on(hosts, 2) == []
    assert len(planned_on(hosts, 2, devices="cpu,cpu")) == 2


def test_the_number_of_replicas_counts_over_all_hosts():
    hosts = {name: with_gpus(name, 2) for name in "abcd"}
    assert len(planned_on(hosts, 4)) == 2
    first, *rest = planned_on(hosts, 4, replicas=1)
    assert rest == []
    assert planned_on(hosts, 4, [first], replicas=1) == []


def test_settings_that_cannot_be_spread_say_what_is_missing():
    with pytest.raises(ValidationError, match="needs a split model"):
        ModelSettings(source="torchvision:resnet18", spread=True)
    with pytest.raises(ValidationError, match="needs devices_per_replica"):
        ModelSettings(source="torchvision:resnet18", placement="tensor", spread=True)
    settings = Settings(models={"m": spread(2)}, default_model="m")
    with pytest.raises(DeviceError, match=r"spread is for several hosts.* cluster_port"):
        HostPlans(CPU, None).plan("m", settings)
    plans = HostPlans(None, None)
    assert plans.plan("m", settings) == []
    plans.join("a", CPU)
    with pytest.raises(DeviceError, match="needs 2 devices, and there are 1 on a"):
        plans.plan("m", settings)
    plans.join("b", CPU)
    (config,) = plans.plan("m", settings)
    assert set(config.hosts) == {"a", "b"}
    assert "a cpu" in place_text(config)


async def test_spread_worker_comes_and_goes_with_its_hosts(arena: Arena):
    hosted = Hosted(arena, spread(2))
    catalog, engine = hosted.catalog, hosted.engine
    catalog.add_host("a", CPU)
    assert hosted.workers() == []
    assert not catalog.serving["m"].is_lost
    catalog.add_host("b", CPU)
    await until(lambda: hosted.workers() == ["a+b 0"])
    catalog.add_host("c", CPU)
    await asyncio.sleep(0)
    assert hosted.workers() == ["a+b 0"], "c alone has too few devices"
    instance = catalog.serving["m"].submit(ref_to(b"x", 20), [b"x"])
    await until(lambda: bool(engine.started[0].batches))
    hosted.lose("b")
    await until(lambda: hosted.workers() == ["a+c 1"])
    await until(lambda: bool(engine.started[1].batches))
    engine.started[1].answer()
    await instance
    hosted.lose("a")
    assert hosted.workers() == []
    catalog.add_host("a", CPU)
    await until(lambda: hosted.workers() == ["a+c 1"])
