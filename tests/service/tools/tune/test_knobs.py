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
_WORKERS, _FRONTS = "replicas x threads", "processes that take calls"


def knobs(
    folder: Path,
    *,
    model: str = "",
    cores: int = 2,
    gpus: tuple[Gpu, ...] = (),
    fixed: frozenset[str] = frozenset(),
    **facts: Any,
) -> dict[str, Knob]:
    (folder / "inferpool.toml").write_text(
        f'[models.net]\nsource = "torchvision:resnet18"\n{model}'
    )
    host = Host(cpus=tuple(range(cores)), num_cores=cores, gpus=gpus)
    whole = {"settings": load({}, {}, folder).settings, "model": "net", "host": host}
    known = KnobFacts(**{"goal": Goal(), "preset": "folded", **whole, **facts})
    return {knob.name: knob for knob in knobs_for(known, fixed)}


def ladder(name: str, *values: object) -> list[dict[str, object]]:
    return [{name: value} for value in values]


def workers(*numbers: tuple[int, int]) -> list[dict[str, int]]:
    return [{"replicas": num, "threads_per_replica": each} for num, each in numbers]


@pytest.mark.parametrize(
    ("name", "given", "ways"),
    [
        (_WORKERS, {}, [workers((1, 1)), workers((1, 2))]),
        (
            _WORKERS, {"cores": 16},  # as it is: 8 x 2
            [workers((7, 2)), workers((4, 4), (2, 8), (1, 16)), workers((16, 1))],
        ),
        (
            _WORKERS,  # a split model keeps its devices
            {"model": 'placement = "tensor"\ndevices_per_replica = 4', "cores": 8},
            [[{"devices_per_replica": 2, "replicas": 2}]],
        ),
        (_WORKERS, {"model": 'placement = "pipeline"', "gpus": _GPUS}, None),
        (_WORKERS, {"cores": 1}, None),
        (_WORKERS, {"gpus": _GPUS}, [ladder("replicas", 4, 6)]),
        (_WORKERS, {"fixed": frozenset({"replicas", "speed"})}, None),
        ("batch size", {"model": "max_batch_size = 16", "fixed": frozenset({"replicas"})},
         [ladder("max_batch_size", 32, 64, 128), ladder("max_batch_size", 8, 4, 2)]),
        ("credit", {"model": "credit = 3"}, [ladder("credit", 4, 5), ladder("credit", 2)]),
        (
            "wait for a batch", {"model": "batch_wait_ms = 2.0"},
            [ladder("batch_wait_ms", 5.0), ladder("batch_wait_ms", 0.0)],
        ),
        ("speed preset", {}, [ladder("speed", "exact"), ladder("speed", "channels_last")]),
        ("speed preset", {"preset": "exact"}, None),
        ("speed preset", {"model": 'speed = "exact"'}, None),
        ("speed preset", {"fixed": frozenset({"replicas", "speed"})}, None),
        ("decoding", {"decode": "fast"}, [ladder("decode", "exact")]),
        ("decoding", {"model": 'decode = "fast"', "decode": "fast"}, None),
        ("decoding", {}, None),
        (_FRONTS, {}, [ladder("front_ends", 2)]),
        (
            _FRONTS, {"cores": 16, "num_fronts": 4},
            [ladder("front_ends", 5, 6), ladder("front_ends", 3)],
        ),
        ("decoders", {}, None),
        (
            "decoders", {"num_decoders": 6},
            [ladder("decoders", 8), ladder("decoders", 3, 1, 0)],
        ),
        ("objective", {}, None),
        ("objective", {"goal": Goal(p99_ms=50.0)}, [ladder("objective_p99_ms", 50.0)]),
    ],
)  # fmt: skip
def test_ladders_of_a_knob_begin_at_the_users_settings(
    tmp_path: Path, name: str, given: dict[str, Any], ways: object
):
    found = knobs(tmp_path, **given)
    assert (found[name].ways if name in found else None) == ways
