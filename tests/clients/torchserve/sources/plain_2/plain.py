"""A module-level `handle()`, which tells what it was given, and does what a test asks for."""

import torch
from ts.utils.util import PredictionException

HEADERS = (
    *("Content-Type", "X-Of-The-Test"),  # TorchServe finds a header only as the client spells it
    *("url_path", "explain", "describe", "data", "first", "second", "body"),
)


def handle(data, context):
    """Answer for each row: the types and values of its parts, and some headers."""
    if data is None:  # when the model is loaded
        return None
    answers = [_answer(row, context, place) for place, row in enumerate(data)]
    if "short" in answers:
        return answers[:-1]
    if "no list" in answers:
        return "no list"
    if "nothing" in answers:
        return None
    return answers


def _answer(row, context, place):
    found = row.get("do")
    wish = bytes(found).decode() if isinstance(found, bytes | bytearray) else found
    if wish in ("short", "no list", "nothing"):
        return wish
    if wish == "raise":
        raise ValueError("a secret of the handler")
    if wish == "predict":
        raise PredictionException("an error that the handler chose", 512)
    if wish == "predict_400":
        raise PredictionException("a bad input, says the handler", 400)
    if wish == "memory":
        raise MemoryError("too much")
    if wish == "cuda":
        raise RuntimeError("CUDA out of memory, says a test")
    if wish in ANSWERS:
        return ANSWERS[wish]
    return {
        "version": VERSION,
        "parts": {name: _told(value) for name, value in row.items()},
        "headers": {
            name: context.get_request_header(place, name)
            for name in HEADERS
            if context.get_request_header(place, name) is not None
        },
    }


def _told(value):
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, len(value), bytes(value[:64]).decode("latin-1")]
    return [type(value).__name__, value]


ANSWERS = {
    "text": "a text with an é",
    "bytes": b"\x00\x01bytes\xff",
    "bytearray": bytearray(b"an array"),
    "number": 3.5,
    "null": None,
    "true": True,
    "list": [1, 2.5, "three", None],
    "deep": {"a": {"b": [1, {"c": "é"}]}},
    "empty": "",
    "empty_dict": {},
    "nan": float("nan"),
    "object": object(),
    "tensor": torch.tensor([1.0, 2.0]),
}
VERSION = "2.0"
