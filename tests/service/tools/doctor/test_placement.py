from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

from inferpool.models.base import Model
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.split.report import Survey
from inferpool.service.checks.facts import gather
from inferpool.service.checks.findings import Finding
from inferpool.service.settings.loader import load
from inferpool.service.tools.doctor.placement import ModelRoom, judge, room_for
from inferpool.service.tools.tune.race import PlacementRace, Speed
from inferpool.workers.beside.survey import find_network, may_have_network, survey
from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu
from tests.service.checks.machines import GIB, TWO_CORES, root_of

CPU = torch.device("cpu")
Ways = Mapping[str, Mapping[str, object]]


def gpus(num: int) -> Host:
    found = [
        Gpu(index=i, uuid=f"GPU-{i}", name="L4", memory_bytes=24 * GIB, cpus=()) for i in range(num)
    ]
    return Host(cpus=tuple(range(8)), num_cores=8, gpus=tuple(found))


class Tower(nn.Sequential):
    """60 GiB of parameters, which no test has the memory for."""

    tensor_plan: ClassVar = {"*": "gather"}  # a plan that is found would have to be verified

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16384, 16384, bias=False) for _ in range(60)))


def surveyed(model: Model, rooms: dict[int, int]) -> Survey:
    found = find_network(model, Placement(devices=("cpu",)))
    assert found is not None
    return survey(model, found, device=CPU, max_rows=8, rooms=rooms)


@pytest.fixture(scope="module")
def tower() -> Survey:
    return surveyed(ModuleModel(Tower), {2: 24 * GIB, 4: 24 * GIB})


def room_of(host: Host, folder: Path, root: Path = Path("/"), **flags: str) -> ModelRoom:
    settings = load({"model": "torchvision:resnet18", **flags}, {}, folder).settings
    (name,) = settings.models
    return room_for(name, gather(settings, host, root), settings)


def advice(tower: Survey, host: Host, tmp_path: Path, **flags: str) -> Finding:
    return judge("m", tower, room_of(host, tmp_path, **flags), 400 << 20)


def test_model_of_60_gib_is_a_pipeline_over_four_gpus_of_24(tower: Survey, tmp_path: Path):
    assert tower.num_bytes == 60 * GIB
    found = advice(tower, gpus(4), tmp_path)
    assert found.level == "error"
    assert "replicate x4 does not fit" in found.message
    assert "pipeline x4 takes 15.4 GiB of 24.0 GiB on each" in found.message
    assert found.advice == 'set placement = "pipeline", devices_per_replica = 4'
    fits = {row[0]: row[2] for row in found.rows}
    assert (fits["2 of pipeline x2"], fits["pipeline x4"]) == ("no", "yes")
    split = advice(tower, gpus(4), tmp_path, placement="pipeline", devices_per_replica="4")
    assert split.level == "ok"
    fits_nowhere = advice(tower, gpus(2), tmp_path)
    assert fits_nowhere.level == "error"
    assert "3 such GPUs would be enough" in fits_nowhere.advice


def test_needless_split_is_a_warning(tower: Survey, tmp_path: Path):
    small = replace_bytes(tower, 1 << 20)
    found = advice(small, gpus(4), tmp_path, placement="tensor")
    assert (found.level, found.advice) == ("warning", 'set placement = "replicate"')
    assert "split only what does not fit" in found.message
    assert advice(small, gpus(4), tmp_path).level == "ok"


def raced(survey: Survey, folder: Path, speeds: Mapping[str, Speed]) -> tuple[Finding, Ways]:
    """Return the finding on a placement by tensor, and the placements that were measured."""
    room = room_of(TWO_CORES, folder, placement="tensor")
    race = Mock(spec=PlacementRace, return_value=speeds)
    found = judge("m", replace_bytes(survey, 1 << 20), room, race=race)
    return found, race.call_args.args[1]


def test_needless_split_is_a_warning_only_if_it_was_measured_slower(tower: Survey, tmp_path: Path):
    speeds = {"replicate x2": Speed(rate=200), "tensor x2": Speed(rate=9, ratio=0.45)}
    slower, asked = raced(tower, tmp_path, speeds)
    assert list(asked) == ["replicate x2", "pipeline x2", "tensor x2"]
    assert asked["replicate x2"] == {
        "placement": "replicate",
        "devices_per_replica": "auto",
        "replicas": 2,
    }
    assert slower.level == "warning"
    assert "tensor x2 is chosen, which has 0.45 of the throughput of replicate x2" in slower.message
    cells = {row[0]: row[3] for row in slower.rows}
    assert cells["placement"] == "inputs/s"
    assert (cells["replicate x2"], cells["tensor x2"]) == ("200", "9 (0.45)")
    faster, _ = raced(tower, tmp_path, {**speeds, "tensor x2": Speed(rate=220, ratio=1.1)})
    assert faster.level == "ok"
    failed, _ = raced(tower, tmp_path, {**speeds, "tensor x2": Speed(problem="a worker failed")})
    cells = {row[0]: row[3:] for row in failed.rows}
    assert cells["tensor x2"] == ("not measured", "a worker failed")  # only the last is wrapped


def test_gpu_that_shares_the_hosts_memory_has_what_is_free_there(tmp_path: Path):
    own = gpus(1)
    shared = replace(own, gpus=(replace(own.gpus[0], is_unified=True),))
    root = root_of(tmp_path)
    assert room_of(own, tmp_path, root).device_bytes == 24 * GIB
    on_cpus = room_of(own, tmp_path, root, devices="cpu").device_bytes
    assert room_of(shared, tmp_path, root).device_bytes == on_cpus


def test_processes_on_a_cpu_share_its_memory(tower: Survey, tmp_path: Path):
    found = judge("m", tower, replace(room_of(TWO_CORES, tmp_path), device_bytes=63 * GIB))
    assert found.advice == 'set placement = "replicate", replicas = 1'
    assert "2 replicas do not fit, but one does, with 60.2 GiB of 63.0 GiB" in found.message


def test_activations_are_measured_with_one_layer_in_memory_at_a_time():
    wide = [TensorSpec(name="x", dtype="float32", shape=(-1, 2048))]
    layers = (nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    found = surveyed(ModuleModel(lambda: nn.Sequential(*layers), inputs=wide), {2: 1 << 20})
    _, pipeline, tensor = found.ways
    assert sum(pipeline.rank_bytes) == found.num_bytes == 3 * 4 * (2048 * 2048 + 2048)
    assert found.activation_bytes is not None
    assert found.activation_bytes < found.num_bytes / 2
    assert tensor.rank_bytes[0] == pytest.approx(found.num_bytes / 2, rel=0.01)


def test_model_that_loads_itself_is_not_loaded_to_be_measured():
    class SelfLoadingModel(Model):
        def load(self, placement: Placement) -> None:
            raise AssertionError

    assert not may_have_network(SelfLoadingModel())
    assert may_have_network(ModuleModel(Tower))


def replace_bytes(tower: Survey, num_bytes: int) -> Survey:
    """Return the same survey for another size."""
    factor = num_bytes / tower.num_bytes
    ways = [
        msgspec.structs.replace(
            way, rank_bytes=tuple(round(each * factor) for each in way.rank_bytes)
        )
        for way in tower.ways
    ]
    return msgspec.structs.replace(tower, num_bytes=num_bytes, ways=tuple(ways))
