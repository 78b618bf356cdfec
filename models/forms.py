"""Tensors and examples of forms that are one instance. Runs in worker processes only."""

import base64
from collections.abc import Mapping, Sequence

import msgspec

from inferpool.models.errors import InputError
from inferpool.models.inputs import features_of
from inferpool.models.item import Features, Item
from inferpool.models.json_errors import JsonErrors
from inferpool.models.spec import TensorSpec
from inferpool.models.upload import Upload, pack_form, read_form


def features_of_form(item: Item, inputs: Sequence[TensorSpec]) -> Features:
    """Return the tensors of a form, one in each field: lists of numbers, or a file of their bytes.

    Raises:
        InputError: The form does not fit; the message says where, and what would fit.
    """
    members = [
        msgspec.json.encode(name) + b":" + _json_of(name, value)
        for name, value in read_form(item.payload, item.headers).items()
    ]
    text = b"{" + b",".join(members) + b"}"
    return features_of(Item(kind="json", payload=memoryview(text)), inputs)


def _json_of(name: str, value: object) -> bytes:
    if isinstance(value, Upload):
        if value.data.startswith(b"\x93NUMPY"):
            raise InputError(
                f"instance.{name}: a file of numpy.save is no part of such a form; send its bytes "
                "alone, or the numbers as a list"
            )
        return msgspec.json.encode({"b64": base64.b64encode(value.data).decode()})
    if isinstance(value, str):  # `-F x=3` is a text, and here it is meant as a number
        try:
            msgspec.json.decode(value)
        except JsonErrors:
            pass
        else:
            return value.encode()
    return msgspec.json.encode(value)


def example_of_form(fields: Mapping[str, object]) -> tuple[Item, bytes] | None:
    """Return a model's example as the form that it stands for, and as JSON; None without a file.

    Raises:
        TypeError: JSON has no such value, and it is no `Upload`.
    """
    parts = [(name, each) for name, value in fields.items() for each in _each_of(value)]
    if not any(isinstance(each, Upload) for _, each in parts):
        return None
    pieces, headers = pack_form(
        (name, each if isinstance(each, Upload) else msgspec.json.encode(each))
        for name, each in parts
    )
    item = Item(kind="form", payload=memoryview(b"".join(pieces)), headers=headers)
    shown = {
        name: [_shown(each) for each in value] if isinstance(value, list) else _shown(value)
        for name, value in fields.items()
    }
    return item, msgspec.json.encode(shown)


def _each_of(value: object) -> list[object]:
    """Return the values of a field's parts: those of a list with files stand alone."""
    has_files = isinstance(value, list) and any(isinstance(each, Upload) for each in value)
    return value if has_files else [value]  # type: ignore[return-value]  # it is a list


def _shown(value: object) -> object:
    """Return what stands for a file in JSON."""
    if isinstance(value, Upload):
        return {"b64": base64.b64encode(value.data).decode()}
    return value
