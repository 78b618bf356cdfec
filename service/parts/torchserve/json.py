"""Writes JSON in the form of TorchServe's front end, which is Gson's pretty form."""

from typing import Any

import msgspec


def pretty(value: Any) -> bytes:
    """Return a value as JSON: two spaces for each level, and a line feed at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def error_body(status: int, kind: str, message: str) -> bytes:
    """Return the body of an error; `kind` is the name of one of TorchServe's exceptions."""
    return pretty({"code": status, "type": kind, "message": message})
