from pathlib import Path
from typing import Any

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.tools.tune.knobs import Knob, KnobFacts, knobs_for
from inferpool.service.tools.tune.plan import Goal
from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu

_GPUS = tuple(
    Gpu(index=i, uuid=f"GPU-{i}", name="A100", memory_bytes=2**36, cpus=()) for i in (0, 1)
)


def knobs(
    folder: Path,
    model: str = "",
    *,
    cores: int = 2,
    gpus: tuple[Gpu, ...] = (),
    fixed: frozenset[str] = frozenset(),
    **facts: object,
) -> dict[str, Knob]:
    file = folder / "inferpool.toml"
    file.write_text(f'[models.net]\nsource = "torchvision:resnet18"\n{model}')
    host = Host(cpus=tuple(range(cores)), num_cores=cores, gpus=gpus)
    facts = {"goal": Goal(), "preset": "folded", **facts}
    known = KnobFacts(settings=load({}, {}, folder).settings, model="net", host=host, **facts)  # type: ignore[arg-type]
    return {knob.name: knob for knob in knobs_for(known, fixed)}


@pytest.mark.parametrize(
    ("name", "given", "ways"),
    [
        (
            "replicas x threads",
            {},
            [
                [{"replicas": 1, "threads_per_replica": 1}],
                [{"replicas": 1, "threads_per_replica": 2}],
            ],
        ),
        (
            "replicas x threads",
            {"cores": 16},  # as it is: 8 x 2
            [
                [{"replicas": 7, "threads_per_replica": 2}],
                [
                    {"replicas": 4, "threads_per_replica": 4},
                    {"replicas": 2, "threads_per_replica": 8},
                    {"replicas": 1, "threads_per_replica": 16},
                ],
                [{"replicas": 16, "threads_per_replica": 1}],
            ],
        ),
        (
            "replicas x threads",  # a split model keeps its devices
            {"model": 'placement = "tensor"\ndevices_per_replica = 4', "cores": 8},
            [[{"devices_per_replica": 2, "replicas": 2}]],
        ),
        ("replicas x threads", {"model": 'placement = "pipeline"', "gpus": _GPUS}, None),
        ("replicas x threads", {"cores": 1}, None),
        ("replicas x threads", {"gpus": _GPUS}, [[{"replicas": 4}, {"replicas": 6}]]),
        ("replicas x threads", {"fixed": frozenset({"replicas", "speed"})}, None),
        ("credit", {"model": "credit = 3"}, [[{"credit": 4}, {"credit": 5}], [{"credit": 2}]]),
        (
            "wait for a batch",
            {"model": "batch_wait_ms = 2.0"},
            [[{"batch_wait_ms": 5.0}], [{"batch_wait_ms": 0.0}]],
        ),
        ("speed preset", {}, [[{"speed": "exact"}], [{"speed": "channels_last"}]]),
        ("speed preset", {"preset": "exact"}, None),
        ("speed preset", {"model": 'speed = "exact"'}, None),
        ("speed preset", {"fixed": frozenset({"replicas", "speed"})}, None),
        ("decoding", {"decode": "fast"}, [[{"decode": "exact"}]]),
        ("decoding", {"model": 'decode = "fast"', "decode": "fast"}, None),
        ("decoding", {}, None),
        ("processes that take calls", {}, [[{"front_ends": 2}]]),
        (
            "processes that take calls",
            {"cores": 16, "num_fronts": 4},
            [[{"front_ends": 5}, {"front_ends": 6}], [{"front_ends": 3}]],
        ),
        ("decoders", {}, None),
        (
            "decoders",
            {"num_decoders": 6},
            [[{"decoders": 8}], [{"decoders": 3}, {"decoders": 1}, {"decoders": 0}]],
        ),
        ("objective", {}, None),
        ("objective", {"goal": Goal(p99_ms=50.0)}, [[{"objective_p99_ms": 50.0}]]),
    ],
)
def test_ladders_of_a_knob_begin_at_the_users_settings(
    tmp_path: Path, name: str, given: dict[str, Any], ways: object
):
    found = knobs(tmp_path, **given)
    assert (found[name].ways if name in found else None) == ways


def test_batch_size_is_doubled_and_halved_whatever_else_is_fixed(tmp_path: Path):
    found = knobs(tmp_path, "max_batch_size = 16", fixed=frozenset({"replicas"}))["batch size"]
    assert [way[0] for way in found.ways] == [{"max_batch_size": 32}, {"max_batch_size": 8}]
