"""The command that a start prints for a person to try."""

import json
import shlex
from math import prod

from service.api.predict import PREFIX
from service.pool import Pool

_MAX_NUMBERS = 32
"""More are no pleasure to read."""


def command_to_try(url: str, pool: Pool) -> str:
    """A command that asks a model for a prediction; empty where nobody knows what it takes.

    Args:
        url: Where the service listens.
        pool: Of the model.
    """
    if any(not spec.shape for spec in pool.inputs):
        return ""
    post = f"curl {_from_here(url)}{PREFIX}/{pool.name} -H 'Content-Type: "
    if pool.example is not None:
        body = json.dumps({"instances": [pool.example]}, ensure_ascii=False)
        return f"{post}application/json' -d {shlex.quote(body)}"
    if not pool.inputs:
        return f"{post}application/octet-stream' --data-binary hello"
    first = pool.inputs[0]
    if first.name == "image" and first.dtype == "uint8":
        return f"{post}image/jpeg' --data-binary @photo.jpg"
    shape = [max(size, 1) for size in first.instance_shape]
    if len(pool.inputs) > 1 or prod(shape) > _MAX_NUMBERS:
        return f"{post}application/safetensors' --data-binary @inputs.safetensors"
    numbers: object = 0
    for size in reversed(shape):
        numbers = [numbers] * size
    return f"{post}application/json' -d '{json.dumps({'instances': [numbers]})}'"


def _from_here(url: str) -> str:
    """The URL as this host can ask for it: "every address" is none to connect to."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
