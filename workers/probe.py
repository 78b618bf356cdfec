"""A process that tries out what the front end must not: torch, its devices, a user's class.

`inferpool doctor` runs it as `python -m workers.probe`, with its orders as JSON on stdin, and reads
its answers, one JSON object a line, from stdout. It may hang or crash; whoever runs it bounds it.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil


def main() -> None:
    """Follow the orders: {"models": [...], "measure": whether to load them, too}."""
    orders = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints is no answer

    def say(kind: str, **facts: object) -> None:
        answers.write(json.dumps({"kind": kind, **facts}) + "\n")
        answers.flush()

    began = time.monotonic()
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        say("torch", problem=_described(error))
        return
    say("torch", problem="", seconds=time.monotonic() - began)
    for order in orders["models"]:
        try:
            if order["measure"]:
                say("measured", model=order["name"], **_measure(order))
            else:
                download = getattr(_build(order), "download", "")  # torchvision's have it
                say("model", model=order["name"], problem="", download=str(download))
        except Exception as error:  # whatever a user's class raises
            say("model", model=order["name"], problem=_described(error))
    if orders["has_gpu"]:
        say("cuda", **_cuda(torch))


def _build(order: Mapping[str, Any]) -> Any:
    from models.registry import build

    return build(order["source"], order["weights"], order["options"])


def _measure(order: Mapping[str, Any]) -> dict[str, object]:
    """Load a model as a worker does, and compute its samples."""
    import torch

    from models.spec import Placement
    from workers.own_process import pin

    placement = msgspec.convert(order["placement"], Placement)
    pin(placement)
    before = _own_bytes()
    began = time.monotonic()
    model = _build(order)
    model.load(placement)
    load_s = time.monotonic() - began
    loaded = _own_bytes()
    seconds: dict[int, float] = {}
    with torch.inference_mode():
        features = [model.preprocess(item) for item in model.warmup()]
        sizes = sorted({1, order["max_batch_size"]}) if features else []
        for size in sizes:
            batch = model.collate([features[i % len(features)] for i in range(size)])
            for _ in range(3):  # the first warms up
                began = time.monotonic()
                outputs = {name: out.cpu() for name, out in model.forward(batch).items()}
                model.postprocess(outputs)
                seconds[size] = time.monotonic() - began
    on_gpu = placement.devices[0].startswith("cuda")
    return {
        "torch_bytes": before,
        "load_bytes": loaded - before,
        "predict_bytes": _own_bytes() - loaded,
        "gpu_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "load_s": load_s,
        "predict_s": [[size, duration] for size, duration in seconds.items()],
    }


def _cuda(torch: Any) -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"problem": "torch finds no usable GPU, although the driver lists some"}
    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        try:
            x = torch.ones(8, 8, device=f"cuda:{index}")
            float((x @ x).sum())
        except Exception as error:  # no kernel for it, no memory, a broken device
            capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
            return {
                "problem": f"cuda:{index} (compute capability {capability}) cannot multiply: "
                f"{_described(error)}; torch was built for {', '.join(built)}"
            }
    return {"problem": "", "built_for": built}


def _own_bytes() -> int:
    """The proportional set size, where the system knows it."""
    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main()
