"""Turns a user's input into a request body that can be sent more than once."""

import asyncio
import base64
import contextlib
import io
import json
import os
import sys
import uuid
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

import httpx

from .errors import UnsendableError
from .safetensors import safetensors_parts
from .tensors import is_tensor, raw_tensor

_PIECE_BYTES = 1 << 20
"""Size of the pieces in which a body is sent."""
_RESERVED = ("dtype", "shape", "name", "output")
"""Query keys that describe tensors, so no parameter in a query can have these names."""
_MAX_QUERY_CHARACTERS = 6000
"""Longest query; the service accepts URLs of 8 KiB."""
_MAGIC = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"\x93NUMPY", "application/x-npy"),
)
_MAGIC_BYTES = 16
_TYPE_BY_SUFFIX = {
    ".safetensors": "application/safetensors",
    ".txt": "text/plain; charset=utf-8",
    ".jsonl": "application/jsonl",
    ".ndjson": "application/jsonl",
    ".tar": "application/x-tar",
}
"""Content types of files without magic bytes."""
_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic"),
    *(".npy", ".safetensors", ".json"),
)
"""Endings of texts that are most likely file names."""
_PNG_MODES = ("1", "L", "LA", "I", "P", "RGB", "RGBA", "I;16")


class RequestBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Body of a request with its content type. It can be iterated over again, for a retry.

    A file is read piece by piece while it is sent; it is never in memory as a whole.
    """

    def __init__(
        self,
        source: Path | Sequence[bytes | memoryview],
        content_type: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self.query = dict(query or {})
        num_bytes = source.stat().st_size if isinstance(source, Path) else sum(map(len, source))
        self.headers = {
            "Content-Type": content_type,
            "Content-Length": str(num_bytes),
            **(headers or {}),
        }

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces."""
        if isinstance(self._source, Path):
            with _catch_unreadable(), self._source.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        else:
            yield from _pieces(self._source)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces; a thread reads a file."""
        if isinstance(self._source, Path):
            with (
                _catch_unreadable(),
                await asyncio.to_thread(self._source.open, "rb") as file,
            ):
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    yield piece
        else:
            for piece in _pieces(self._source):
                yield piece


def make_body(
    value: object, parameters: Mapping[str, object] | None, *, envelope: bool = True
) -> RequestBody:
    """Return the body that asks for a prediction on a value; see `Client.predict`.

    Without `envelope`, JSON is the value as it stands, and parameters come in the query.

    Raises:
        UnsendableError: The value or the parameters cannot be sent.
    """
    with _catch_unreadable():
        if isinstance(value, str) and names_file(value):
            warnings.warn(file_question(value), stacklevel=2)
        if isinstance(value, os.PathLike):
            return _file_body(Path(value), parameters, envelope=envelope)
        if isinstance(value, bytes | bytearray | memoryview):
            return _bytes_body(bytes(value), parameters)
        if is_tensor(value):
            tensor = raw_tensor(value)
            shape = ",".join(map(str, tensor.shape))
            headers = {"X-Tensor-Dtype": tensor.dtype, "X-Tensor-Shape": shape}
            query = query_of(parameters)
            return RequestBody(
                [tensor.data], "application/octet-stream", headers=headers, query=query
            )
        if isinstance(value, Mapping) and value and all(map(is_tensor, value.values())):
            parts = safetensors_parts({name: raw_tensor(each) for name, each in value.items()})
            return RequestBody(parts, "application/safetensors", query=query_of(parameters))
        if _is_pil_image(value):
            return RequestBody([_png(value)], "image/png", query=query_of(parameters))
        if hasattr(value, "read"):
            return _bytes_body(_read_open_file(cast("IO[Any]", value)), parameters)
        if isinstance(value, Mapping) and any(map(_is_file, _flat(value.values()))):
            return _form_body(value, parameters)
        if not envelope:
            return _document(value, parameters)
        return _json_body([value], parameters)


def are_many(value: object) -> TypeGuard[Iterable[object] | AsyncIterable[object]]:
    """Return whether a value holds many inputs of a job, such as a list, and is no text or file."""
    return isinstance(value, Iterable | AsyncIterable) and not (
        isinstance(value, str | bytes | bytearray | memoryview | os.PathLike | Mapping)
        or is_tensor(value)
        or _is_pil_image(value)
        or hasattr(value, "read")
    )


def json_line(value: object) -> bytes:
    """Return one instance of many as a line of JSON; files, bytes and pictures as `{"b64": ...}`.

    Raises:
        UnsendableError: The value cannot be sent so.
    """
    with _catch_unreadable():
        if isinstance(value, os.PathLike):
            return _file_line(Path(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return _encoded_line(bytes(value))
        if _is_pil_image(value):
            return _encoded_line(_png(value))
        if hasattr(value, "read"):
            return _encoded_line(_read_open_file(cast("IO[Any]", value)))
        return _json(value) + b"\n"


def query_of(parameters: Mapping[str, object] | None) -> dict[str, str]:
    """Return the query for parameters, for a body that has no room for them.

    Raises:
        UnsendableError: A name is reserved, or they are too long.
    """
    query = {name: _json(value).decode() for name, value in (parameters or {}).items()}
    if taken := sorted(set(query) & set(_RESERVED)):
        raise UnsendableError(f"a parameter named {taken[0]!r} can only be sent with a JSON input")
    if sum(map(len, [*query, *query.values()])) > _MAX_QUERY_CHARACTERS:
        raise UnsendableError("parameters this long can only be sent with a JSON input")
    return query


def names_file(text: str) -> bool:
    """Return whether a text is, or looks like, the name of a file that can be sent."""
    if os.path.exists(text):
        return True
    return text.lower().endswith(_SUFFIXES) and not any(map(str.isspace, text))


def file_question(name: str) -> str:
    """Return the question for a user that sends a file name as a text."""
    return f"a str is sent as a text: did you mean the file, pathlib.Path({name!r})?"


@contextlib.contextmanager
def _catch_unreadable() -> Iterator[None]:
    """Raise an `UnsendableError` for errors of files."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UnsendableError(f"this cannot be read: {error}") from error


def _file_body(
    path: Path, parameters: Mapping[str, object] | None, *, envelope: bool
) -> RequestBody:
    suffix = path.suffix.lower()
    if suffix == ".json":
        content = _read_json(path)
        if not envelope:
            return _document(content, parameters)
        if isinstance(content, dict) and "instances" in content:
            own = content.get("parameters") or {}
            if not isinstance(content["instances"], list) or not isinstance(own, dict):
                raise UnsendableError(f"{path}: instances must be a list, and parameters an object")
            return _json_body(content["instances"], {**own, **(parameters or {})})
        return _json_body([content], parameters)
    if content_type := _TYPE_BY_SUFFIX.get(suffix):
        return RequestBody(path, content_type, query=query_of(parameters))
    with path.open("rb") as file:
        start = file.read(_MAGIC_BYTES)
    if not start:
        raise UnsendableError(f"{path} is empty")
    return RequestBody(path, _content_type(start), query=query_of(parameters))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsendableError(f"{path} is not JSON: {error}") from None


def _read_open_file(file: IO[Any]) -> bytes:
    content = file.read()
    if isinstance(content, str):
        raise UnsendableError("the file is open as text: open it with mode 'rb'")
    return bytes(content)


def _file_line(path: Path) -> bytes:
    match path.suffix.lower():
        case ".json":
            return _json(_read_json(path)) + b"\n"
        case ".txt":
            return _json(path.read_text(encoding="utf-8")) + b"\n"
        case ".npy" | ".safetensors":
            raise UnsendableError(
                f"{path}: among several inputs, tensors are sent as arrays, not as files: load it"
            )
    return _encoded_line(path.read_bytes())


def _encoded_line(content: bytes) -> bytes:
    _check_any(content)
    return b'{"b64":"%b"}\n' % base64.b64encode(content)


def _bytes_body(content: bytes, parameters: Mapping[str, object] | None) -> RequestBody:
    _check_any(content)
    return RequestBody([content], _content_type(content[:_MAGIC_BYTES]), query=query_of(parameters))


def _check_any(content: bytes) -> None:
    if not content:
        raise UnsendableError("there are no bytes")


def _document(value: object, parameters: Mapping[str, object] | None) -> RequestBody:
    return RequestBody([_json(value)], "application/json", query=query_of(parameters))


def _form_body(
    fields: Mapping[str, object], parameters: Mapping[str, object] | None
) -> RequestBody:
    """Return a form (RFC 7578): files and bytes as files, all else as fields; a list is repeated.

    A field says that it is JSON where a text would be understood.
    """
    boundary = uuid.uuid4().hex
    parts: list[bytes | memoryview] = []
    for name, value in fields.items():
        for each in value if _has_files(value) else [value]:
            head, content = _part(name, each)
            parts += [f"--{boundary}\r\n{head}\r\n\r\n".encode(), content, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    content_type = f"multipart/form-data; boundary={boundary}"
    return RequestBody(parts, content_type, query=query_of(parameters))


def _part(name: str, value: object) -> tuple[str, bytes]:
    """Return the head and the content of a part of a form."""
    head = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    if isinstance(value, str):
        is_like_json = value.lstrip()[:1] in ("[", "{")
        return head + ("\r\nContent-Type: text/plain" if is_like_json else ""), value.encode()
    if not (_is_file(value) or isinstance(value, bytes | bytearray | memoryview)):
        return f"{head}\r\nContent-Type: application/json", _json(value)
    filename = name
    if isinstance(value, os.PathLike):
        filename, content = Path(value).name, Path(value).read_bytes()
    elif hasattr(value, "read"):
        content = _read_open_file(cast("IO[Any]", value))
        filename = os.path.basename(str(getattr(value, "name", name)))
    else:
        content = _png(value) if _is_pil_image(value) else bytes(cast("bytes", value))
    known = _TYPE_BY_SUFFIX.get(os.path.splitext(filename)[1].lower())
    content_type = known or _content_type(content[:_MAGIC_BYTES])
    head = f'{head}; filename="{_quoted(filename)}"\r\nContent-Type: {content_type}'
    return head, content


def _quoted(name: str) -> str:
    """Return a name for a header, with the characters escaped that browsers escape (HTML 4.10)."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _is_file(value: object) -> bool:
    return isinstance(value, os.PathLike) or _is_pil_image(value) or hasattr(value, "read")


def _has_files(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and any(map(_is_file, value))


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Yield values, and those of lists."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _json_body(instances: Sequence[object], parameters: Mapping[str, object] | None) -> RequestBody:
    content: dict[str, object] = {"instances": instances}
    if parameters:
        content["parameters"] = parameters
    return RequestBody([_json(content)], "application/json")


def _json(value: object) -> bytes:
    try:
        text = json.dumps(
            value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_to_plain
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsendableError(f"this cannot be sent as JSON: {error}") from None


def _to_plain(value: Any) -> object:
    """Return a JSON value for one that JSON lacks."""
    if is_tensor(value):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _content_type(start: bytes) -> str:
    for magic, content_type in _MAGIC:
        if start.startswith(magic):
            return content_type
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "image/webp"
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1"):
        return "image/avif"
    return "application/octet-stream"


def _is_pil_image(value: object) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _png(image: Any) -> bytes:
    """Return a PNG file, turned as its EXIF data says, like files in the service."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)  # the fastest
    return file.getvalue()


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, bytes) and len(part) <= _PIECE_BYTES:
            yield part
        else:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                yield bytes(view[start : start + _PIECE_BYTES])
