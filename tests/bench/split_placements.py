"""The placements and the models that the benchmark `split` holds against each other."""

import argparse
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.bench.load import Bodies
from tests.bench.photos import photos
from tests.bench.processes import OUT, Contender, inferpool

STACK = "tests.bench.stack:StackModel"
WIDTH = 2048
"""As in `stack`, which imports torch."""
_NUM_TEXTS = 8
_WORDS = 24
_NUM_ROWS = 4
_SEED = 0

PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    "replicate 1": {"placement": "replicate", "replicas": 1},
    "replicate 2": {"placement": "replicate", "replicas": 2},
    "pipeline 2": {"placement": "pipeline", "replicas": 1, "devices_per_replica": 2},
    "tensor 2": {"placement": "tensor", "replicas": 1, "devices_per_replica": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model, and what it is asked."""

    source: str
    bodies: Callable[[], Bodies]


def stack_bodies() -> Bodies:
    """Rows of random numbers, as raw float32."""
    generator = np.random.default_rng(_SEED)
    files = [OUT / "bodies" / f"row-{number}.f32" for number in range(_NUM_ROWS)]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_bytes(generator.standard_normal(WIDTH, np.float32).tobytes())
    path = f"/predict?dtype=float32&shape={WIDTH}"
    return Bodies(files=files, content_type="application/octet-stream", path=path)


def _texts() -> Bodies:
    from inferpool.models.text.prose import PROSE

    words = PROSE.split()
    files = [OUT / "bodies" / f"text-{number}.json" for number in range(_NUM_TEXTS)]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        text = " ".join(words[number * _WORDS : (number + 1) * _WORDS])
        file.write_text(json.dumps({"instances": [text]}))
    return Bodies(files=files, content_type="application/json")


WORKLOADS: Mapping[str, Workload] = {
    "efficientnet": Workload(
        source="efficientnet_lite0",
        bodies=lambda: Bodies(files=photos(), content_type="image/jpeg"),
    ),
    "minilm": Workload(source="minilm_l6", bodies=_texts),
    "mlp": Workload(source=STACK, bodies=stack_bodies),
}


def contender(
    args: argparse.Namespace,
    name: str,
    source: str,
    settings: Mapping[str, object],
    options: Mapping[str, object],
) -> Contender:
    """Our service with one model, by a settings file of its own."""
    lines = ["[models.model]", f'source = "{source}"', 'speed = "exact"']
    lines += [f"{key} = {_toml(value)}" for key, value in settings.items()]
    if options:
        lines.append(f"options = {_toml(options)}")
    text = "\n".join(lines) + "\n"
    file = OUT / "settings" / f"split-{zlib.crc32(text.encode()):08x}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return inferpool(args.inferpool, "--config", str(file), name=name)


def chosen(args: argparse.Namespace) -> Sequence[str]:
    """The names of the workloads asked for."""
    names: Sequence[str] = args.workloads.split(",")
    return names


def options_of(workload: str, args: argparse.Namespace) -> Mapping[str, object]:
    """The options of a workload's model."""
    return {"num_blocks": args.blocks} if workload == "mlp" else {}


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
