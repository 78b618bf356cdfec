"""Answers of `/predict` in tensors: npy, npz, safetensors, raw bytes. Imported with the first."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import NamedTuple
from urllib.parse import quote
from zipfile import ZipFile, ZipInfo

import msgspec

from inferpool.models.spec import DTYPE_BYTES
from inferpool.service.api.codecs.answers import AnswerFormat, Outcome
from inferpool.service.api.codecs.tensors import NPY_DTYPES, NPY_MAGIC, SAFETENSORS_DTYPES
from inferpool.service.api.errors import Headers
from inferpool.service.errors import BadRequestError, NotAcceptableError
from inferpool.service.queue.instance import Result
from inferpool.workers.shared.messages import TensorBlob

_NPY_ALIGN = 64
_SAFETENSORS_ALIGN = 8
_UNQUOTED = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
"""Characters that `X-Tensor-Name` has as they are; all others are percent-encoded."""


def encode_tensors(
    chosen: AnswerFormat, outcomes: Sequence[Outcome], is_batch: bool, output: str | None
) -> tuple[Headers, bytes]:
    """Render the tensors of all instances of a call; return headers and the body.

    Args:
        chosen: The form.
        outcomes: Results of the instances, in order.
        is_batch: Give tensors a batch dimension.
        output: Name of the only output wanted; None for all.

    Raises:
        ServiceError: The form cannot hold them.
    """
    columns = _columns([_blobs_of(outcome) for outcome in outcomes], is_batch, output)
    return _ENCODERS[chosen](columns)


def _blobs_of(outcome: Outcome) -> list[TensorBlob]:
    assert isinstance(outcome, Result)
    assert isinstance(outcome.value, list), "JSON came where tensors were asked for"
    return outcome.value


class _OutputColumn(NamedTuple):
    """One output of all instances of a call."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[bytes]
    """Its bytes; each encoder makes the only copy of them."""
    list_name: str = ""
    """Name of the output, if that is a list and this is the tensor of one instance."""


def _columns(
    instances: Sequence[list[TensorBlob]], is_batch: bool, output: str | None
) -> list[_OutputColumn]:
    """Return the outputs of all instances; a batch's along a new first dimension.

    An output that is a list has a column for each instance: "boxes.0" and so on.
    """
    by_name = [{blob.name: blob for blob in blobs} for blobs in instances]
    names = list(by_name[0])
    if output is not None:
        if output not in names:
            raise BadRequestError(f"output: the model has no {output!r}; it has {_listed(names)}")
        names = [output]
    columns = []
    for name in names:
        blobs = [each[name] for each in by_name if name in each]
        if len(blobs) < len(instances):
            raise NotAcceptableError(f"output {name!r}: not every instance has it; ask for JSON")
        if any(blob.is_ragged for blob in blobs):
            columns += [
                _OutputColumn(f"{name}.{i}", blob.dtype, blob.shape, [blob.buffer], name)
                for i, blob in enumerate(blobs)
            ]
            continue
        first = blobs[0]
        if any(blob.shape != first.shape or blob.dtype != first.dtype for blob in blobs):
            raise NotAcceptableError(
                f"output {first.name!r} differs in shape between the instances, so they cannot be "
                "stacked: ask for JSON, or send them one by one"
            )
        shape = (len(blobs), *first.shape) if is_batch else first.shape
        columns.append(_OutputColumn(name, first.dtype, shape, [blob.buffer for blob in blobs]))
    return columns


def _only(columns: Sequence[_OutputColumn]) -> _OutputColumn:
    names = list(dict.fromkeys(column.list_name or column.name for column in columns))
    if len(names) != 1:
        raise BadRequestError(
            f"this form holds one output, and the model has {_listed(names)}: choose by "
            "?output=NAME, or accept application/x-npz or application/safetensors"
        )
    if len(columns) > 1:
        raise NotAcceptableError(
            f"output {names[0]!r} is a list with a tensor for each instance, and this form holds "
            "one tensor: accept application/x-npz or application/safetensors"
        )
    return columns[0]


def _encode_npy(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    column = _only(columns)
    return [(b"content-type", b"application/x-npy")], b"".join([_npy_head(column), *column.parts])


def _npy_head(column: _OutputColumn) -> bytes:
    """Return what stands before the numbers in version 1.0 of numpy.lib.format."""
    descr = NPY_DTYPES.get(column.dtype)
    if descr is None:
        raise NotAcceptableError(
            f"npy has no {column.dtype}, which output {column.name!r} is; accept "
            "application/safetensors"
        )
    text = b"{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (
        descr.encode(),
        repr(column.shape).encode(),
    )
    padding = -(len(NPY_MAGIC) + 4 + len(text) + 1) % _NPY_ALIGN
    length = len(text) + padding + 1
    return NPY_MAGIC + b"\x01\x00" + length.to_bytes(2, "little") + text + b" " * padding + b"\n"


def _encode_npz(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    """Write a zip file that has an npy file for each tensor, as `numpy.savez` does."""
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        for column in columns:
            if "\0" in column.name:  # zip files end a name there
                raise NotAcceptableError(
                    f"npz has no name like {column.name!r}; accept application/safetensors"
                )
            head = _npy_head(column)
            entry = ZipInfo(f"{column.name}.npy")
            entry.file_size = len(head) + sum(map(len, column.parts))  # says how large it may get
            with archive.open(entry, "w") as member:
                for part in (head, *column.parts):
                    member.write(part)
    return [(b"content-type", b"application/x-npz")], file.getvalue()


def _encode_safetensors(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    """Write a header of JSON, padded with spaces to 8 bytes, then the tensors without gaps.

    The widest dtypes come first, so that each tensor is aligned.
    """
    for column in columns:
        if column.dtype not in SAFETENSORS_DTYPES:
            raise NotAcceptableError(
                f"safetensors has no {column.dtype}, which output {column.name!r} is: choose "
                "others by ?output=NAME, or accept application/octet-stream"
            )
    columns = sorted(columns, key=lambda column: -DTYPE_BYTES[column.dtype])
    entries = {}
    position = 0
    for column in columns:
        end = position + sum(map(len, column.parts))
        entries[column.name] = {
            "dtype": SAFETENSORS_DTYPES[column.dtype],
            "shape": column.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _SAFETENSORS_ALIGN)
    parts = [part for column in columns for part in column.parts]
    body = b"".join([len(text).to_bytes(8, "little"), text, *parts])
    return [(b"content-type", b"application/safetensors")], body


def _encode_raw(columns: Sequence[_OutputColumn]) -> tuple[Headers, bytes]:
    column = _only(columns)
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"x-tensor-name", quote(column.list_name or column.name, safe=_UNQUOTED).encode()),
        (b"x-tensor-dtype", column.dtype.encode()),
        (b"x-tensor-shape", ",".join(map(str, column.shape)).encode()),
    ]
    return headers, b"".join(column.parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


_ENCODERS: dict[AnswerFormat, Callable[[Sequence[_OutputColumn]], tuple[Headers, bytes]]] = {
    "npy": _encode_npy,
    "npz": _encode_npz,
    "safetensors": _encode_safetensors,
    "raw": _encode_raw,
}
