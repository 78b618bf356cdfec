"""Reads tensors and JSON, and checks them against a model's inputs. Runs in worker processes only.

Large lists are decoded by type in C. Only if that fails, the wrong number is searched for.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferpool.models.attached import attached
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.json_errors import JsonErrors, json_message
from inferpool.models.spec import TensorSpec, matches

_MAX_RANK = 16
_SUMMABLE = (torch.float32, torch.float64)


class _Encoded(msgspec.Struct, forbid_unknown_fields=True):
    b64: bytes


_encoded = msgspec.json.Decoder(_Encoded)


def features_of(item: Item, inputs: Sequence[TensorSpec]) -> Features:
    """Return the tensors of one instance by the names of the model's inputs.

    Tensors of kind "tensors" are views of the payload; `collate` copies them.

    Raises:
        InputError: The instance does not fit; the message says where, and what would fit.
    """
    if not inputs:
        raise NotImplementedError("a model must declare its `inputs` or define preprocess(item)")
    if item.kind == "tensors":
        return _from_tensors(item, inputs)
    if item.kind == "json":
        return _from_json(item, inputs)
    if item.kind == "form":
        of_form: Features = attached("features of form")(item, inputs)
        return of_form
    found = "an image" if item.kind == "image" else "opaque bytes"
    raise InputError(f"this model takes {describe(inputs)} as tensors or as JSON, not {found}")


def non_finite_input(item: Item, features: Features | None = None) -> str | None:
    """Return where the tensors of a client have NaN or an infinity, or None.

    Args:
        item: The instance.
        features: Its tensors if they are the numbers that the client sent, in any form.
    """
    sent = item.views() if item.kind == "tensors" else features
    for name, tensor in (sent or {}).items():
        if isinstance(tensor, Tensor) and (place := place_of_non_finite(name, tensor)):
            return place
    return None


def place_of_non_finite(name: str, tensor: Tensor) -> str | None:
    """Return the first NaN or infinity with its place: "tensor 'x': nan at [0, 3]"; or None.

    The tensor of a raw body may have no name: "the tensor: nan at [0, 3]".
    """
    # A sum takes a tenth of the time, and one that is finite has no other numbers in it.
    if tensor.dtype in _SUMMABLE and math.isfinite(tensor.sum()):
        return None
    is_finite = tensor.isfinite()
    if is_finite.all():
        return None
    place = is_finite.logical_not().nonzero()[0].tolist()
    where = f" at {place}" if place else ""
    which = f"tensor {name!r}" if name else "the tensor"
    return f"{which}: {tensor[tuple(place)].item()}{where}"


def describe(inputs: Sequence[TensorSpec]) -> str:
    """Describe inputs in words: "'x' (float32 [any, 4])"."""
    return " and ".join(f"{spec.name!r} ({spec.dtype} {shape_text(spec)})" for spec in inputs)


def json_texts(payload: memoryview, names: Sequence[str]) -> dict[str, memoryview]:
    """Find the JSON text of each input: by its name in an object, or all of it for the only input.

    Raises:
        InputError: The names differ, or the payload is not JSON.
    """
    if bytes(payload[:64]).lstrip()[:1] != b"{":
        if len(names) > 1:
            raise InputError(f"instance: expected an object with {_names_text(names)}")
        return {names[0]: payload}
    try:
        texts = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except JsonErrors as error:
        raise InputError(f"instance: {json_message(error, payload)}") from None
    _check_names(list(texts), names)
    return {name: memoryview(text) for name, text in texts.items()}


def json_place(payload: memoryview, name: str) -> str:
    """Return the place of an input in the instance, as messages name it."""
    if bytes(payload[:64]).lstrip()[:1] != b"{":
        return "instance"
    return f"instance.{name}" if name.isidentifier() else f"instance[{name!r}]"


def json_string(text: memoryview, where: str = "instance") -> str:
    """Decode a JSON string; messages call it `where`.

    Raises:
        InputError: The value is no string.
    """
    try:
        value = msgspec.json.decode(text)
    except JsonErrors as error:
        raise InputError(f"{where}: {json_message(error, text)}") from None
    if not isinstance(value, str):
        raise InputError(f"{where}: {_expected('a string', value)}")
    return value


def json_bytes(text: memoryview, where: str = "instance") -> bytes | None:
    """Decode the bytes of an object `{"b64": "..."}`; return None for any other value.

    Raises:
        InputError: The text is no base64.
    """
    if bytes(text[:1]) != b"{":
        return None
    try:
        return _encoded.decode(text).b64
    except msgspec.ValidationError as error:
        if str(error).endswith("`$.b64`"):
            raise InputError(f"{where}.b64: not base64 in a string") from None
    except JsonErrors as error:
        raise InputError(f"{where}: {json_message(error, text)}") from None
    return None


def json_array(
    text: memoryview, dtype: str, *, shape: Sequence[int] | None = None, where: str = "instance"
) -> NDArray[Any]:
    """Decode a number, or nested lists of them.

    Args:
        text: One JSON value.
        dtype: A key of `DTYPE_BYTES`; bfloat16 comes as float32.
        shape: Expected shape, with -1 for any size; None for any shape.
        where: Name of the value in messages.

    Raises:
        InputError: The lists are ragged, of another shape, or hold numbers that the dtype cannot.
    """
    numpy_dtype = np.dtype("float32" if dtype == "bfloat16" else dtype)
    try:
        nested = _decoder(_leaf_type(numpy_dtype), _rank(text, where)).decode(text)
        array = np.array(nested, np.float64 if numpy_dtype.kind == "f" else numpy_dtype)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found below
            array = array.astype(numpy_dtype, copy=False)
    except (*JsonErrors, ValueError, OverflowError) as error:
        raise _explanation(text, numpy_dtype, shape, where, error) from None
    if shape is not None and not matches(array.shape, shape):
        raise _explanation(text, numpy_dtype, shape, where, None)
    if numpy_dtype.kind == "f" and not np.isfinite(array).all():
        place = "".join(f"[{i}]" for i in np.argwhere(~np.isfinite(array))[0])
        raise InputError(f"{where}{place}: the number is out of range for {dtype}")
    return array


def _from_tensors(item: Item, inputs: Sequence[TensorSpec]) -> Features:
    names = [header.name for header in item.headers]
    for header in item.headers:
        if header.offset + header.num_bytes > len(item.payload):
            raise InputError(f"tensor {header.name!r}: its bytes end after the payload does")
    if names == [""] and len(inputs) == 1:
        tensors = {inputs[0].name: item.views()[""]}
    else:
        _check_names(names, [spec.name for spec in inputs])
        tensors = item.views()
    for spec in inputs:
        tensor = tensors[spec.name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            raise InputError(f"tensor {spec.name!r}: expected {spec.dtype}, found {dtype}")
        if spec.shape and not matches(tensor.shape, spec.instance_shape):
            raise InputError(
                f"tensor {spec.name!r}: expected shape {shape_text(spec)}, "
                f"found {list(tensor.shape)}"
            )
    return tensors


def _from_json(item: Item, inputs: Sequence[TensorSpec]) -> Features:
    payload = item.payload
    texts = json_texts(payload, [spec.name for spec in inputs])
    features = {}
    for spec in inputs:
        where = json_place(payload, spec.name)
        data = None if item.is_document else json_bytes(texts[spec.name], where)
        if data is not None:
            features[spec.name] = _from_bytes(data, spec, where)
            continue
        array = json_array(
            texts[spec.name],
            spec.dtype,
            shape=spec.instance_shape if spec.shape else None,
            where=where,
        )
        features[spec.name] = torch.from_numpy(array).to(getattr(torch, spec.dtype))
    return features


def _from_bytes(data: bytes, spec: TensorSpec, where: str) -> Tensor:
    """Return a tensor of row-major, little-endian bytes with the declared dtype and shape."""
    expected = f"{where}.b64: expected the bytes of {spec.dtype} {shape_text(spec)}"
    if not spec.shape or spec.instance_shape.count(-1) > 1:
        raise InputError(f"{expected}, whose shape they do not tell: send npy or safetensors")
    try:
        if spec.dtype == "bool":
            flat = torch.tensor([each != 0 for each in data], dtype=torch.bool)
        else:
            dtype = getattr(torch, spec.dtype)
            flat = (
                torch.frombuffer(bytearray(data), dtype=dtype)
                if data
                else torch.empty(0, dtype=dtype)
            )
        return flat.reshape(spec.instance_shape)
    except (ValueError, RuntimeError):
        raise InputError(f"{expected}, found {len(data)} bytes") from None


def _check_names(found: Sequence[str], expected: Sequence[str]) -> None:
    if sorted(found) == sorted(expected):
        return
    for name in found:
        if name not in expected:
            raise InputError(f"input {name!r} is unknown: expected {_names_text(expected)}")
        if found.count(name) > 1:
            raise InputError(f"input {name!r} occurs {found.count(name)} times")
    missing = [name for name in expected if name not in found]
    raise InputError(f"{_names_text(missing)} missing: expected {_names_text(expected)}")


def _rank(text: memoryview, where: str) -> int:
    """Return how deep the first list is nested; in lists that are not ragged, all are as deep."""
    rank = 0
    for char in bytes(text[:1024]):
        if char == ord("["):
            rank += 1
        elif char not in b" \t\r\n":
            break
    if rank > _MAX_RANK:
        raise InputError(f"{where}: lists are nested more than {_MAX_RANK} deep")
    return rank


def _leaf_type(dtype: np.dtype[Any]) -> type:
    if dtype.kind == "b":
        return bool
    return float if dtype.kind == "f" else int


@lru_cache
def _decoder(leaf: type, rank: int) -> msgspec.json.Decoder[Any]:
    nested: Any = leaf
    for _ in range(rank):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _explanation(
    text: memoryview,
    dtype: np.dtype[Any],
    shape: Sequence[int] | None,
    where: str,
    error: Exception | None,
) -> InputError:
    """Return the error that names the first wrong place in a value."""
    try:
        value = msgspec.json.decode(text)
    except JsonErrors as bad:
        return InputError(f"{where}: {json_message(bad, text)}")
    lengths = _lengths(value)
    if shape is not None:
        own = [*lengths, *([-1] * len(shape))]
        lengths = [own[i] if want == -1 else want for i, want in enumerate(shape)]
    found = _culprit(value, lengths, dtype)
    if found is None:
        return InputError(f"{where}: {json_message(error, text)}" if error else where)
    path, complaint = found
    return InputError(f"{where}{''.join(f'[{i}]' for i in path)}: {complaint}")


def _lengths(value: object) -> list[int]:
    lengths = []
    while isinstance(value, list):
        lengths.append(len(value))
        value = value[0] if value else None
    return lengths


def _culprit(
    value: object, lengths: Sequence[int], dtype: np.dtype[Any]
) -> tuple[list[int], str] | None:
    """Return the indices of the first value that does not fit, and what is wrong with it."""
    if not lengths:
        complaint = _complaint(value, dtype)
        return ([], complaint) if complaint else None
    wanted = "a list" if lengths[0] == -1 else _count_text(lengths[0], len(lengths))
    if not isinstance(value, list):
        return [], f"expected {wanted}, found {_kind_text(value)}"
    if lengths[0] not in (-1, len(value)):
        return [], f"expected {wanted}, found {len(value)}"
    for i, each in enumerate(value):
        if found := _culprit(each, lengths[1:], dtype):
            return [i, *found[0]], found[1]
    return None


def _complaint(value: object, dtype: np.dtype[Any]) -> str | None:
    if dtype.kind == "b":
        return None if value is True or value is False else _expected("true or false", value)
    if dtype.kind == "f":
        return None if type(value) in (int, float) else _expected("a number", value)
    if type(value) is not int:
        return _expected("a whole number", value)
    limits = np.iinfo(dtype)
    if limits.min <= value <= limits.max:
        return None
    return f"{value} is out of range for {dtype.name} ({limits.min} to {limits.max})"


def _expected(what: str, value: object) -> str:
    return f"expected {what}, found {_kind_text(value)}"


def _kind_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _count_text(length: int, rank: int) -> str:
    noun = "number" if rank == 1 else "list"
    return f"{length} {noun}" if length == 1 else f"{length} {noun}s"


def shape_text(spec: TensorSpec) -> str:
    """Describe the shape of one instance: "[any, 4]"."""
    if not spec.shape:
        return "of any shape"
    return f"[{', '.join('any' if n == -1 else str(n) for n in spec.instance_shape)}]"


def _names_text(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)
