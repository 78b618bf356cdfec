"""Placement, `inferpool doctor` and `inferpool chaos` on a host with several devices."""

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.devices import DeviceError, find_host
from inferpool.workers.host.placing import PlacementRequest, place
from tests.e2e import forked
from tests.gpu.conftest import Devices


def placed(**request: object) -> list[Placement]:
    host = find_host(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return place(host, PlacementRequest(**request))  # type: ignore[arg-type]  # fields of it


def test_auto_places_a_replica_on_each_device(devices: Devices):
    placements = placed()
    assert [placement.visible for placement in placements] == [(uuid,) for uuid in devices.uuids]
    assert {placement.devices for placement in placements} == {(f"{devices.kind}:0",)}
    assert {placement.memory_fraction for placement in placements} == {None}


def test_more_replicas_take_the_devices_in_turn_and_share_their_memory(devices: Devices):
    num = len(devices.uuids)
    placements = placed(replicas=2 * num)
    assert [placement.visible[0] for placement in placements] == 2 * devices.uuids
    assert all(0.2 < (placement.memory_fraction or 0) < 0.5 for placement in placements)
    with pytest.raises(DeviceError, match=r"set at most 0\.5"):
        placed(replicas=2 * num, memory_fraction=0.6)


def test_devices_are_named_by_kind_by_index_and_by_uuid(devices: Devices):
    for names in (devices.kind, devices.named(*range(len(devices.uuids))), ",".join(devices.uuids)):
        found = [placement.visible[0] for placement in placed(devices=names)]
        assert found == devices.uuids


def test_groups_of_devices_hold_split_replicas(devices: Devices):
    devices.named(0, 1, 2, 3)
    first, second = placed(split="tensor", ranks=2)
    assert (first.num_ranks, second.num_ranks) == (2, 2)
    assert sorted((*first.visible, *second.visible)) == sorted(devices.uuids[:4])
    assert first.devices == (f"{devices.kind}:0", f"{devices.kind}:1")


def inferpool(*arguments: str) -> CompletedProcess[str]:
    return forked.run([*forked.COMMAND, *arguments], timeout=170)


@pytest.mark.slow
def test_doctor_finds_the_devices_and_computes_on_them(devices: Devices, record_property):
    model = "tests.small_classifier:SmallClassifier"
    done = inferpool("doctor", model, "--port", "0", "--devices", devices.named(0), "--json")
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, [each for each in found.values() if each["level"] == "error"]
    assert found["GPUs"]["level"] == "ok"
    assert found["GPU driver"]["level"] == "ok"
    assert devices.uuids[0] in found["devices of smallclassifier"]["message"]
    assert found["placement of smallclassifier"]["level"] == "ok"
    for name, each in found.items():
        if each["level"] in ("warning", "error"):
            record_property(name, each["message"])


@pytest.mark.measures
@pytest.mark.slow
def test_chaos_loses_and_spoils_no_answer(devices: Devices, tmp_path: Path, record_property):
    config = tmp_path / "inferpool.toml"
    names = devices.named(0, 1) if len(devices.uuids) > 1 else devices.named(0)
    config.write_text(
        '[models.m]\nsource = "tests.small_classifier:SmallClassifier"\nreplicas = 2\n'
        f'devices = "{names}"\nspeed = "exact"\nbatch_timeout_s = 3\n'
    )
    done = inferpool(
        *("chaos", "--config", str(config), "--json", "--port", "0"),
        *("--requests", "300", "--kills", "2", "--kill-every", "1"),
        *("--stop-every", "0", "--poison-every", "2", "--forkserver-every", "0"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["chaos"]["right"] == report["chaos"]["sent"] >= 300
    assert report["faults"]["kill"] >= 2
    record_property("right of sent", f"{report['chaos']['right']} of {report['chaos']['sent']}")
