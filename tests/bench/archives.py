"""`archives`: an archive of TorchServe's image classifier, served by TorchServe and by us.

Both read the same archive and the same kind of `config.properties`, and answer the same calls of
`/predictions/resnet18` with photographs. TorchServe lives in an environment of its own.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench.frame import Benchmark, Cell, benchmark
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
from tests.bench.workloads import WORKLOADS, photos

_NETWORK = """\
from torchvision.models.resnet import BasicBlock, ResNet


class ImageClassifier(ResNet):
    def __init__(self):
        super().__init__(BasicBlock, [2, 2, 2, 2])
"""
_MOST_DEVIATION = 1e-3
_OURS, _THEIRS = "inferpool", "torchserve"
_PATH = "/predictions/resnet18"


@benchmark(
    "an archive's image classifier, beside TorchServe",
    rounds=5,
    secs=4,
    warm=2,
    connections=(1, 16),
    serve_args="",
    torchserve=("", "command `torchserve` of an environment with torchserve and torchvision"),
    batches=("1,8", "values of batchSize in model-config.yaml; comma-separated"),
    workers=("1,2", "workers of TorchServe; comma-separated"),
)
def archives(bench: Benchmark) -> None:
    """Let all servers take turns, each at each number of connections."""
    bodies = replace(photos(), path=_PATH)
    answers: dict[str, Sequence[Mapping[str, float]]] = {}
    turns = {
        command.name: partial(_load, bench, command, bodies, answers)
        for command in _contenders(bench)
    }
    bench.take_turns(turns)
    bench.report("connections")
    figures = ("requests_per_s", "p50_ms", "p99_ms", "cpu_s_per_1000", "pss_mib")
    bench.report_ratios("connections", figures, lambda name: not name.startswith(_OURS))
    first = next(iter(answers.values()), ())
    rows = [[name, f"{_deviation(first, each):.1e}"] for name, each in answers.items()]
    caption = "Largest of any probability from the first server's, on six photographs."
    bench.add_table("Deviations", ["server", "deviation"], rows, caption)
    bench.draw("requests_per_s", "connections")


def _contenders(bench: Benchmark) -> Iterator[ServerCommand]:
    args = bench.args
    for batch in args.batches.split(","):
        for workers in args.workers.split(",") if args.torchserve else ():
            yield _torchserve(args.torchserve, args.port, int(batch), int(workers))
    for batch in args.batches.split(","):
        name = f"{_OURS}, batches of {batch}"
        folder = _store(name, args.port, int(batch))
        yield inferpool(args, "--torchserve", str(folder / "config.properties"), name=name)


def _torchserve(command: str, port: int, batch: int, workers: int) -> ServerCommand:
    name = f"{_THEIRS}, batches of {batch}, workers: {workers}"
    folder = _store(name, port, batch, workers)
    start = f"--start --foreground --ncs --disable-token-auth --model-store {folder}"
    binaries = Path(command).absolute().parent
    env = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "LOG_LOCATION": str(folder),
        "METRICS_LOCATION": str(folder),
    }
    properties = ["--ts-config", str(folder / "config.properties")]
    return ServerCommand(name=name, argv=[command, *start.split(), *properties], env=env)


def _store(name: str, port: int, batch: int, workers: int | None = None) -> Path:
    """Write a model store with the archive, and `config.properties`; return its folder.

    A batch of several waits for a millisecond, the least that TorchServe knows.
    """
    folder = OUT / "archives" / name.replace(", ", "-").replace(" ", "-").replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    config = f"batchSize: {batch}\nmaxBatchDelay: 1\n"
    if workers:
        config += f"minWorkers: {workers}\nmaxWorkers: {workers}\n"
    model = {
        "modelName": "resnet18",
        "modelVersion": "1.0",
        "handler": "image_classifier",
        "modelFile": "network.py",
        "serializedFile": "resnet18.pth",
        "configFile": "model-config.yaml",
    }
    with zipfile.ZipFile(folder / "resnet18.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        archive.writestr("network.py", _NETWORK)
        archive.writestr("model-config.yaml", config)
        archive.writestr(
            "index_to_name.json", json.dumps({f"{n}": f"label {n}" for n in range(1000)})
        )
        archive.write(WORKLOADS["tensor-resnet18"].weights(), "resnet18.pth")
    kinds = ("inference", "management", "metrics")
    lines = [
        *(f"{kind}_address=http://{HOST}:{port + place}" for place, kind in enumerate(kinds)),
        f"model_store={folder}",
        "load_models=resnet18.mar",
        "enable_grpc=false",
        "disable_system_metrics=true",
        "",
    ]
    (folder / "config.properties").write_text("\n".join(lines))
    return folder


def _load(
    bench: Benchmark,
    command: ServerCommand,
    bodies: Bodies,
    answers: dict[str, Sequence[Mapping[str, float]]],
    round_: int,
) -> Iterator[Cell]:
    args = bench.args
    with BenchServer(command, args.port) as server:
        server.wait_ready(bodies)
        found = [server.post(bodies, number).json() for number in range(len(bodies.files))]
        first = next(iter(answers.values()), found)
        if (deviation := _deviation(first, found)) > _MOST_DEVIATION:
            raise BenchError(f"{command.name} answers something else: {deviation:.1e} off")
        answers.setdefault(command.name, found)
        if args.warm:
            run_wrk(server, bodies, 16, args.warm)
        for connections in args.connections:
            figures = load_closed(server, bodies, connections, args.secs)
            yield Cell("resnet18", command.name, connections, figures)


def _deviation(some: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    """Return the largest difference of a probability; labels that only one has count whole."""
    return max(
        abs(left.get(label, 0.0) - right.get(label, 0.0))
        for left, right in zip(some, others, strict=True)
        for label in {*left, *right}
    )
