"""Request bodies: files, synthetic images or texts, or JSON."""

import argparse
import io
import json
import math
import secrets
from random import Random

from inferpool.models.text.prose import PROSE
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.inputs import TrialInput, read_inputs

_SIZE = (640, 480)
_NUM_IMAGES = 8
"""Synthetic images that differ, so that no cache on the way answers for the model."""
_SQUARE = 32
_NUM_TEXTS = 256
_TEXT_SIGMA = 0.9
"""Spread of the logarithm of their lengths, which is that of questions and paragraphs together."""
_MAX_WORDS = 1000


def bodies_of(args: argparse.Namespace) -> list[TrialInput]:
    """Read or make the bodies that the command line asks for."""
    if args.text:
        return _texts(args.text, args.instances, args.seed)
    if args.json is not None:
        singles = [_json_body(args.json)]
    elif args.body:
        singles = read_inputs(args.body, content_type=args.content_type, flag="--body")
    else:
        width, height = args.image or _SIZE
        singles = _images(width, height, args.seed)
    if args.instances == 1:
        return singles
    return [_repeated(body, args.instances) for body in singles]


def _json_body(text: str) -> TrialInput:
    return TrialInput(name="json", body=text.encode(), content_type="application/json")


def _images(width: int, height: int, seed: int) -> list[TrialInput]:
    """Return JPEGs of coloured squares with noise, about as large as photographs of their size."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(seed)
    bodies = []
    for _ in range(_NUM_IMAGES):
        rows, columns = -(-height // _SQUARE), -(-width // _SQUARE)
        squares = random.integers(30, 226, (rows, columns, 3), np.int16)
        pixels = squares.repeat(_SQUARE, 0).repeat(_SQUARE, 1)[:height, :width]
        pixels = (pixels + random.integers(-12, 13, pixels.shape, np.int16)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=85)
        bodies.append(TrialInput(name="image", body=file.getvalue(), content_type="image/jpeg"))
    return bodies


def _texts(median: int, num_instances: int, seed: int) -> list[TrialInput]:
    """Return texts of random words with log-normal lengths, different ones in each body."""
    random = Random(seed)
    words = PROSE.split()

    def text() -> str:
        num_words = round(median * math.exp(random.gauss(0, _TEXT_SIGMA)))
        return " ".join(random.choices(words, k=min(max(num_words, 1), _MAX_WORDS)))

    return [
        _json_body(json.dumps({"instances": [text() for _ in range(num_instances)]}))
        for _ in range(_NUM_TEXTS)
    ]


def _repeated(body: TrialInput, num: int) -> TrialInput:
    if body.content_type == "application/json":
        try:
            document = json.loads(body.body)
            whole = {**document, "instances": (document["instances"] * num)[:num]}
        except (ValueError, KeyError, TypeError) as error:
            raise TrialError('--instances: the JSON must be {"instances": [...]}') from error
        return _json_body(json.dumps(whole))
    if body.content_type == "application/safetensors":
        raise TrialError("--instances: not for safetensors; stack the tensors in the file itself")
    boundary = secrets.token_hex(16)
    part = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
        f"Content-Type: {body.content_type}\r\n\r\n"
    ).encode()
    content = (part + body.body + b"\r\n") * num + f"--{boundary}--\r\n".encode()
    form = f"multipart/form-data; boundary={boundary}"
    return TrialInput(name=body.name, body=content, content_type=form)
