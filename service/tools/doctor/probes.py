"""Checks that need torch or a user's code. A separate process makes them, with a time limit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from inferpool.models.accelerator.kinds import CUDA, Accelerator
from inferpool.models.attached import MODEL_FILE_SUFFIXES
from inferpool.models.files.kinds import archive_of
from inferpool.service.checks.devices import all_placements
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.checks.weights import is_lost
from inferpool.service.client.texts import in_words
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.gpus import Gpu

PROBE_TIMEOUT_S = 120.0
"""Time to import torch and all models; torch takes 3 s, more from a cold disk."""
_NOT_READY = "system not yet initialized"
"""CUDA's words where GPUs are behind NVSwitches that are not set up (error 802)."""
_SLOW_LOAD = 0.5
"""Share of load_timeout_s that is worth a warning."""


def check_imports(
    facts: Facts, settings: Settings, timeout_s: float = PROBE_TIMEOUT_S
) -> Iterator[Finding]:
    """Check that torch can be imported, and that each model can be built without its weights."""
    orders = [order_for(facts, settings, name, "model") for name in known_models(facts, settings)]
    used = {uuid for placement in all_placements(facts) for uuid in placement.visible}
    gpus = [gpu for gpu in facts.host.gpus if gpu.uuid in used]
    # CUDA shows a process whole GPUs, or one slice.
    tried = [gpu for gpu in gpus if not gpu.sliced_from] or gpus[:1]
    for answer in probe(orders, timeout_s, facts.host.accelerator, tried):
        yield from _judge(answer, settings)
        if (why := answer.get("unsurveyed")) and may_split(settings.models[answer["model"]]):
            yield note(f"placement of {answer['model']}", why)


def may_split(model: ModelSettings) -> bool:
    """Return whether the model may have a network that can be split."""
    is_whole = model.source.endswith(MODEL_FILE_SUFFIXES) or archive_of(model.source)
    return model.source != "echo" and not is_whole


def measure(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Load each model once, and report the memory and time of a replica."""
    for name in known_models(facts, settings):
        model = settings.models[name]
        order = order_for(facts, settings, name, "measured")
        for answer in probe([order], PROBE_TIMEOUT_S + model.load_timeout_s):
            if answer.get("problem"):
                yield from _judge(answer, settings)
            elif answer["kind"] == "measured":
                yield from _judge_measures(answer, facts, settings, len(facts.placements[name]))


def known_models(facts: Facts, settings: Settings) -> list[str]:
    """Return the models that can be tried: those with a readable file."""
    return [name for name in facts.placements if not is_lost(settings.models[name])]


def order_for(
    facts: Facts, settings: Settings, name: str, do: str, **details: object
) -> dict[str, object]:
    """Return an order for `workers.beside.probe`: what to do with a model."""
    model = settings.models[name]
    config = model.model_config_for(name)
    return {
        "name": name,
        "source": config.source,
        "weights": config.weights,
        "options": dict(config.options),
        "placement": asdict(facts.placements[name][0]),
        "max_batch_size": model.batch_size,
        "do": do,
        **details,
    }


def probe(
    orders: Sequence[Mapping[str, object]],
    timeout_s: float,
    accelerator: Accelerator = CUDA,
    gpus: Sequence[Gpu] = (),
) -> Sequence[Mapping[str, Any]]:
    """Run a probe and return its answers; the last one reports a crash or a timeout.

    Args:
        orders: Results of `order_for`.
        timeout_s: Time for all of them.
        accelerator: Kind of the GPUs.
        gpus: GPUs to try; the probe sees no others.
    """
    # -P: a user's folder must not be imported in place of one of our packages.
    command = [sys.executable, "-P", "-m", "inferpool.workers.beside.probe"]
    told = {"accelerator": accelerator.kind, "devices": list(map(str, gpus)), "models": orders}
    visible = {accelerator.visible: ",".join(gpu.uuid for gpu in gpus)}
    problem = ""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(told, default=str),
            env={**os.environ, **accelerator.environment, **visible},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        out = done.stdout
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            problem = f"the probe process ended with {done.returncode}: {' '.join(last)}"
    except subprocess.TimeoutExpired as expired:
        out = (expired.stdout or b"").decode()
        problem = f"not done after {timeout_s:g} s"
    answers = [json.loads(line) for line in out.split("\n")[:-1]]
    if problem:
        answers.append({"kind": "end", "problem": problem})
    return answers


def _judge(answer: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    kind, problem = answer["kind"], answer["problem"]
    if kind == "torch" and not problem:
        yield ok("import of torch", f"{answer['seconds']:.1f} s")
    elif kind == "torch":
        yield error("import of torch", problem, "install torch again")
    elif kind in ("model", "measured") and problem:
        yield error(f"model {answer['model']}", problem, "correct its source, options or weights")
    elif kind == "model" and answer["download"]:
        yield warning(
            f"model {answer['model']}",
            f"the first start must download {answer['download']}",
            "start once with network access, or set weights to a file",
        )
    elif kind == "model":
        yield ok(
            f"model {answer['model']}", f"{settings.models[answer['model']].source} can be built"
        )
    elif kind == "accelerator" and problem:
        advice = "install a build of torch for this GPU and driver"
        if _NOT_READY in problem:
            advice = "systemctl start nvidia-fabricmanager, of the same version as the driver"
        yield error("GPUs", problem, advice)
    elif kind == "accelerator":
        yield ok("GPUs", f"every GPU works; torch has kernels for {', '.join(answer['built_for'])}")
    else:
        yield error(
            "models",
            problem,
            "check that `python -c 'import torch'` and an import of the model's module work",
        )


def _judge_measures(
    answer: Mapping[str, Any], facts: Facts, settings: Settings, num_replicas: int
) -> Iterator[Finding]:
    name = answer["model"]
    model = settings.models[name]
    check = f"measured {name}"
    parts = (
        f"{in_words(answer['load_bytes'])} loaded, {in_words(answer['predict_bytes'])} to predict"
    )
    gpu = f", {in_words(answer['gpu_bytes'])} on the GPU" if answer["gpu_bytes"] else ""
    times = ", ".join(f"{1000 * s:.1f} ms for a batch of {n}" for n, s in answer["predict_s"])
    load_s = answer["load_s"]
    message = f"{parts}{gpu}; {load_s:.1f} s to load{', ' if times else ''}{times}"
    need = num_replicas * (answer["load_bytes"] + answer["predict_bytes"])
    if need > facts.free_bytes:
        yield error(
            check,
            f"{message}: {num_replicas} replicas need {in_words(need)}, but "
            f"{in_words(facts.free_bytes)} are free",
            "lower replicas, or get more memory",
        )
    elif load_s > _SLOW_LOAD * model.load_timeout_s:
        yield warning(check, f"{message}, which is close to load_timeout_s", "raise load_timeout_s")
    else:
        yield ok(check, message)
    if not times:
        yield note(check, "the model has no warm-up samples", "define warmup()")
