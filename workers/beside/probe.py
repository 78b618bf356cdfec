"""A process that tests what the front end must not touch: torch, its devices, a user's class.

`inferpool doctor` runs it as `python -m inferpool.workers.beside.probe`, with orders as JSON on
stdin, and reads its answers from stdout, one JSON object per line. It may hang or crash, so the
caller limits its time.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import psutil

from inferpool.workers.shared.guard import give_way_for_memory

_NO_NETWORK = "its `load` does not call `load_network`, and so it is not known before it is loaded"


def main() -> None:
    """Follow the orders: {"models": [...], "accelerator": kind, "devices": names}.

    The devices to try are those that the environment shows this process, in the order of the names.
    """
    orders = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that a model cannot print into the answers

    def say(kind: str, **facts: object) -> None:
        answers.write(json.dumps({"kind": kind, **facts}) + "\n")
        answers.flush()

    began = time.monotonic()
    try:
        import torch  # noqa: F401  # to see whether it can be imported
    except Exception as error:  # any error of a broken installation
        say("torch", problem=_described(error))
        return
    say("torch", problem="", seconds=time.monotonic() - began)
    for order in orders["models"]:
        try:
            say(order["do"], model=order["name"], **_ACTS[order["do"]](order))
        except Exception as error:  # any error of a user's class
            say(order["do"], model=order["name"], problem=_described(error))
    if names := orders["devices"]:
        say("accelerator", **_try_devices(orders["accelerator"], names))


def _build(order: Mapping[str, Any]) -> Any:
    from inferpool.models.sources.registry import build

    return build(order["source"], order["weights"], order["options"])


def _try_building(order: Mapping[str, Any]) -> dict[str, object]:
    """Build a model without loading its weights."""
    model = _build(order)
    download = str(getattr(model, "download", ""))
    return {"problem": "", "download": download, "unsurveyed": _why_unsurveyed(model)}


def _why_unsurveyed(model: Any) -> str:
    """Return why the network of a model cannot be measured; empty if it may be."""
    from inferpool.workers.beside.survey import may_have_network

    if getattr(model, "download", ""):
        return "its weights have to be downloaded first"
    return "" if may_have_network(model) else _NO_NETWORK


def _survey(order: Mapping[str, Any]) -> dict[str, object]:
    """Measure a model's network step by step, whole and split."""
    import torch

    from inferpool.models.accelerator.device import foreign_bytes, is_accelerator
    from inferpool.models.spec import Placement
    from inferpool.workers.beside.survey import find_network, survey
    from inferpool.workers.inside.own_process import pin

    placement = msgspec.convert(order["placement"], Placement)
    pin(placement)
    give_way_for_memory()
    device = torch.device(placement.devices[0])
    model = _build(order)
    if why := _why_unsurveyed(model):
        return {"problem": why, "survey": None}
    found = find_network(model, placement)
    if found is None:
        return {"problem": _NO_NETWORK, "survey": None}
    result = survey(
        model,
        found,
        device=device,
        max_rows=order["max_batch_size"],
        rooms=dict(order["rooms"]),
    )
    return {
        "problem": "",
        "survey": msgspec.to_builtins(result),
        "context_bytes": foreign_bytes(device) if is_accelerator(device) else 0,
    }


def _measure(order: Mapping[str, Any]) -> dict[str, object]:
    """Load a model like a worker, and compute its samples."""
    import torch

    from inferpool.models.accelerator.device import is_accelerator, most_reserved_bytes
    from inferpool.models.spec import Placement
    from inferpool.workers.inside.own_process import pin

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
        # All batches repeat the same sample, so that their times can be compared.
        largest = max(features, key=_num_values, default=None)
        for size in sizes:
            batch = model.collate([largest] * size)
            for _ in range(3):  # the first warms up
                began = time.monotonic()
                outputs = {name: out.cpu() for name, out in model.forward(batch).items()}
                model.postprocess(outputs)
                seconds[size] = time.monotonic() - began
    device = placement.devices[0]
    return {
        "torch_bytes": before,
        "load_bytes": loaded - before,
        "predict_bytes": _own_bytes() - loaded,
        "gpu_bytes": most_reserved_bytes(device) if is_accelerator(device) else 0,
        "load_s": load_s,
        "predict_s": [[size, duration] for size, duration in seconds.items()],
    }


def _num_values(features: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in features.values())


def _try_devices(kind: str, names: Sequence[str]) -> dict[str, object]:
    """Compute something on each device of a kind."""
    import torch

    from inferpool.models.accelerator.device import module_of

    module = module_of(kind)
    try:
        module.init()
    except Exception as error:  # no build for it, or no driver that works
        return {"problem": f"torch cannot use the GPUs: {_described(error)}"}
    built = module.get_arch_list()
    if module.device_count() != len(names):
        return {"problem": f"torch finds {module.device_count()} of {len(names)} GPUs"}
    for index, name in enumerate(names):
        try:
            x = torch.ones(8, 8, device=f"{kind}:{index}")
            float((x @ x).sum())
        except Exception as error:  # no kernel for it, no memory, a broken device
            capability = ".".join(map(str, module.get_device_capability(index)))
            return {
                "problem": f"{name} (compute capability {capability}) cannot multiply: "
                f"{_described(error)}; torch was built for {', '.join(built)}"
            }
    return {"problem": "", "built_for": built}


def _own_bytes() -> int:
    """Return the proportional set size, or the resident set size where that is unknown."""
    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_ACTS = {"model": _try_building, "survey": _survey, "measured": _measure}
"""Actions on a model, by the kind of the answer."""


if __name__ == "__main__":
    main()
