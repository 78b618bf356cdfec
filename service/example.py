"""Shows a first example to try: a command to paste, or how to ask."""

import json
import os
import shlex
from collections.abc import Sequence
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from inferpool.models.bodies import body_of
from inferpool.models.spec import DTYPE_BYTES, TensorSpec
from inferpool.service.api.exchange import PREFIX
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import is_trusted

_PHOTO = Path(__file__).parents[1] / "models" / "vision" / "photos" / "chelsea.jpg"
"""The packaged photograph of a cat."""
_MAX_NUMBERS = 32
"""The most numbers to show in a command."""
_MAX_SHOWN_BYTES = 1000
"""The longest body to show in a command."""


def try_or_ask(
    url: str, pool: Pool, settings: Settings, *, photo: Path = _PHOTO
) -> tuple[str, str]:
    """Return a command that asks a model for a prediction, or else a sentence that says how.

    Args:
        url: The address of the service.
        pool: The model's pool.
        settings: The settings, which may demand a key, or have a certificate of their own.
        photo: A picture to send to models of pictures.

    Returns:
        "try" with a command that works as it is, or "ask" with a sentence.
    """
    own, archive = pool.interface.path or f"{PREFIX}/{pool.name}", pool.interface.archive
    if archive is not None and settings.torchserve is not None:
        own = f"/predictions/{archive.name}"
    url = f"{_from_here(url)}{own}"
    kind, text = _command(url, pool, photo)
    if kind == "try":
        text += _key_arguments(settings) + _trust_arguments(settings, urlsplit(url).hostname or "")
    return kind, text


def _is_container() -> bool:
    """Return whether this is a container's main process, and no command that a user runs inside."""
    marks = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    return os.getppid() <= 1 and any(map(os.path.exists, marks))  # 1: it may have an init


def _command(url: str, pool: Pool, photo: Path) -> tuple[str, str]:
    if pool.example is not None:
        return _json_command(url, pool, pool.example) or (
            "ask",
            f"POST to {url}; its example is too long for a line, and on the page",
        )
    if pool.interface.archive is not None:
        return "ask", f"POST to {url} what its handler reads"
    if pool.reads_own_form or not pool.inputs:
        return "ask", (
            f"POST to {url} what its `preprocess` reads; the model shows no `example` to try"
        )
    if _takes_images(pool.inputs):
        if not photo.is_file() or _is_container():  # commands are pasted outside of it
            from inferpool.service.api.openapi.predict import PIXEL

            return _json_command(url, pool, {"b64": PIXEL}) or ("", "")
        sent = f"--data-binary @{shlex.quote(str(photo))}"
        return "try", f"curl {url} -H 'Content-Type: image/jpeg' {sent}"
    if all(spec.shape for spec in pool.inputs):
        shapes = {spec.name: [max(n, 1) for n in spec.instance_shape] for spec in pool.inputs}
        if sum(prod(shape) for shape in shapes.values()) <= _MAX_NUMBERS:
            values = {spec.name: _zeros(spec, shapes[spec.name]) for spec in pool.inputs}
            instance = values if len(values) > 1 else next(iter(values.values()))
            return _json_command(url, pool, instance) or ("", "")
        if len(pool.inputs) == 1:
            return "try", _raw_command(url, pool.inputs[0], shapes[pool.inputs[0].name])
    names = " and ".join(f"{spec.name!r} ({spec.dtype})" for spec in pool.inputs)
    return "ask", f"POST to {url} {names} as application/safetensors, or as JSON"


def _key_arguments(settings: Settings) -> str:
    """Return the arguments that curl needs for the key, without showing it."""
    if not settings.predict_keys:
        return ""
    if settings.predict_keys_file:
        return f' -H "X-API-Key: $(head -n 1 {shlex.quote(settings.predict_keys_file)})"'
    return ' -H "X-API-Key: ${INFERPOOL_PREDICT_KEYS%%,*}"'


def _trust_arguments(settings: Settings, host: str) -> str:
    """Return the argument that curl needs for a certificate that this host does not trust."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or is_trusted(certificate, key, host):
        return ""
    if is_trusted(certificate, key, host, names_it=True):
        return f" --cacert {shlex.quote(os.path.abspath(certificate))}"
    return " --insecure"  # it is for other names than the one that reaches the service from here


def _takes_images(inputs: Sequence[TensorSpec]) -> bool:
    return len(inputs) == 1 and inputs[0].name == "image" and inputs[0].dtype == "uint8"


def _json_command(url: str, pool: Pool, instance: object) -> tuple[str, str] | None:
    body = json.dumps(body_of(pool.interface, instance), ensure_ascii=False)
    if len(body) > _MAX_SHOWN_BYTES:
        return None
    return "try", f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _raw_command(url: str, spec: TensorSpec, shape: list[int]) -> str:
    """Return a command that sends zeros, which are too many to write out."""
    num_bytes = prod(shape) * DTYPE_BYTES[spec.dtype]
    sizes = ",".join(map(str, shape))
    return (
        f"head -c {num_bytes} /dev/zero | curl '{url}?dtype={spec.dtype}&shape={sizes}' "
        "-H 'Content-Type: application/octet-stream' --data-binary @-"
    )


def _zeros(spec: TensorSpec, shape: list[int]) -> object:
    numbers: object = False if spec.dtype == "bool" else 0
    for size in reversed(shape):
        numbers = [numbers] * size
    return numbers


def _from_here(url: str) -> str:
    """Return a URL that this host can use: one cannot connect to "every address"."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
