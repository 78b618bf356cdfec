"""Forms that are one instance: how the front end packs them, and how a worker reads them.

The payload has the contents of all files, and then a table of all fields, as JSON. Its only header
says where the table is, so it goes wherever tensors go. Imported only if a model asks for forms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from inferpool.models.errors import InputError
from inferpool.models.json_errors import JsonErrors, json_message
from inferpool.models.spec import TensorHeader

_NULL = Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file of a form. `decode_image` decodes it as it does bytes."""

    data: bytes
    media_type: str = ""
    """Its content type, as the client says it; empty if it says none."""
    filename: str = ""
    """Its name, as the client says it: never a path to open."""


def upload_of(data: bytes) -> Upload:
    """Return the file that `{"b64": ...}` stands for in JSON."""
    return Upload(data=data)


class FormField(msgspec.Struct, frozen=True, array_like=True):
    """One field of a form, in the table."""

    name: str
    value: Raw = _NULL
    """JSON, if it is no file."""
    media_type: str | None = None
    """The content type of a file; None if it is none."""
    filename: str = ""
    offset: int = 0
    num_bytes: int = 0


_table = msgspec.json.Decoder(list[FormField])


def pack_form(
    fields: Iterable[tuple[str, bytes | Upload]],
) -> tuple[Sequence[bytes], tuple[TensorHeader, ...]]:
    """Return the pieces of a payload and its header, for fields with JSON or with a file."""
    table, files, offset = [], [], 0
    for name, value in fields:
        if isinstance(value, Upload):
            size = len(value.data)
            table.append(FormField(name, _NULL, value.media_type, value.filename, offset, size))
            files.append(value.data)
            offset += size
        else:
            table.append(FormField(name, Raw(value)))
    text = msgspec.json.encode(table)
    return (*files, text), (TensorHeader("", "uint8", (len(text),), offset),)


def read_form(payload: memoryview, headers: Sequence[TensorHeader]) -> dict[str, object]:
    """Return the fields of a form by name: JSON values, and uploads. Two of one name are a list.

    Raises:
        InputError: A number in a field is out of range.
    """
    (header,) = headers
    fields = _table.decode(payload[header.offset : header.offset + header.num_bytes])
    found: dict[str, list[object]] = {}
    for field in fields:
        found.setdefault(field.name, []).append(_value_of(field, payload))
    return {name: each[0] if len(each) == 1 else each for name, each in found.items()}


def _value_of(field: FormField, payload: memoryview) -> object:
    if field.media_type is None:
        try:
            return msgspec.json.decode(field.value)
        except JsonErrors as error:
            found = json_message(error, bytes(field.value))
            raise InputError(f"instance.{field.name[:80]}: {found}") from None
    data = bytes(payload[field.offset : field.offset + field.num_bytes])
    return Upload(data=data, media_type=field.media_type, filename=field.filename)
