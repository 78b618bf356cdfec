"""What a user hands in, as the body of a request that can be sent more than once."""

import asyncio
import base64
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import httpx

from inferpool.service.client.errors import UnsendableError
from inferpool.service.client.safetensors import safetensors_parts
from inferpool.service.client.tensors import is_tensor, tensor_of

_PIECE_BYTES = 1 << 20
"""Of a body, held in memory beside it while it is sent."""
_RESERVED = ("dtype", "shape", "name", "output")
"""Keys of the query that describe tensors, so that no parameter can have these names there."""
_MAX_QUERY_CHARACTERS = 6000
"""The service takes 8 KiB of URL."""
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
_TYPE_BY_SUFFIX = {".safetensors": "application/safetensors", ".txt": "text/plain; charset=utf-8"}
"""Of files that do not begin in a way of their own."""
_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic"),
    *(".npy", ".safetensors", ".json"),
)
"""A text that ends so is the name of a file, most likely."""
_PNG_MODES = ("1", "L", "LA", "I", "P", "RGB", "RGBA", "I;16")


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Bytes with their type. It can be iterated over again, for another try.

    A file is read piece by piece while it is sent, and never held in memory as a whole.
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
        if isinstance(source, Path):
            self.num_bytes = source.stat().st_size
        else:
            self.num_bytes = sum(map(len, source))
        self.headers = {
            "Content-Type": content_type,
            "Content-Length": str(self.num_bytes),
            **(headers or {}),
        }

    def __iter__(self) -> Iterator[bytes]:
        """Its pieces."""
        if isinstance(self._source, Path):
            with _told(), self._source.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        else:
            yield from _pieces(self._source)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Its pieces; a file is read in a thread."""
        if isinstance(self._source, Path):
            with _told(), await asyncio.to_thread(self._source.open, "rb") as file:
                while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                    yield piece
        else:
            for piece in _pieces(self._source):
                yield piece


def body_of(value: object, parameters: Mapping[str, object] | None) -> Body:
    """The body that asks for a prediction on a value.

    Args:
        value: See `Client.predict`.
        parameters: For the model.

    Raises:
        UnsendableError: There is no way to send it.
    """
    with _told():
        if isinstance(value, str) and names_file(value):
            warnings.warn(file_question(value), stacklevel=2)
        if isinstance(value, os.PathLike):
            return _of_file(Path(value), parameters)
        if isinstance(value, bytes | bytearray | memoryview):
            return _of_bytes(bytes(value), parameters)
        if is_tensor(value):
            tensor = tensor_of(value)
            shape = ",".join(map(str, tensor.shape))
            headers = {"X-Tensor-Dtype": tensor.dtype, "X-Tensor-Shape": shape}
            query = _query_of(parameters)
            return Body([tensor.data], "application/octet-stream", headers=headers, query=query)
        if isinstance(value, Mapping) and value and all(map(is_tensor, value.values())):
            parts = safetensors_parts({name: tensor_of(each) for name, each in value.items()})
            return Body(parts, "application/safetensors", query=_query_of(parameters))
        if _is_picture(value):
            return Body([_png_of(value)], "image/png", query=_query_of(parameters))
        if hasattr(value, "read"):
            return _of_open_file(cast("IO[Any]", value), parameters)
        return _of_json([value], parameters)


def names_file(text: str) -> bool:
    """Whether a text is the name of a file, or looks like one of a kind that can be sent."""
    if os.path.exists(text):
        return True
    return text.lower().endswith(_SUFFIXES) and not any(map(str.isspace, text))


def file_question(name: str) -> str:
    """What to ask whoever sends such a text."""
    return f"a str is sent as a text: did you mean the file, pathlib.Path({name!r})?"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tells of an input that cannot be read as of any that cannot be sent."""
    try:
        yield
    except OSError as error:
        raise UnsendableError(f"this cannot be read: {error}") from error


def _of_file(path: Path, parameters: Mapping[str, object] | None) -> Body:
    suffix = path.suffix.lower()
    if suffix == ".json":
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UnsendableError(f"{path} is no JSON: {error}") from None
        if isinstance(content, dict) and "instances" in content:
            own = content.get("parameters") or {}
            if not isinstance(content["instances"], list) or not isinstance(own, dict):
                raise UnsendableError(f"{path}: instances is no list, or parameters is no object")
            return _of_json(content["instances"], {**own, **(parameters or {})})
        return _of_json([content], parameters)
    if content_type := _TYPE_BY_SUFFIX.get(suffix):
        return Body(path, content_type, query=_query_of(parameters))
    with path.open("rb") as file:
        start = file.read(_MAGIC_BYTES)
    if not start:
        raise UnsendableError(f"{path} is empty")
    return Body(path, _type_of(start), query=_query_of(parameters))


def _of_open_file(file: IO[Any], parameters: Mapping[str, object] | None) -> Body:
    content = file.read()
    if isinstance(content, str):
        raise UnsendableError("a file that is open as text: open it with mode 'rb'")
    return _of_bytes(content, parameters)


def _of_bytes(content: bytes, parameters: Mapping[str, object] | None) -> Body:
    if not content:
        raise UnsendableError("there are no bytes")
    return Body([content], _type_of(content[:_MAGIC_BYTES]), query=_query_of(parameters))


def _of_json(instances: Sequence[object], parameters: Mapping[str, object] | None) -> Body:
    content: dict[str, object] = {"instances": instances}
    if parameters:
        content["parameters"] = parameters
    return Body([_json(content)], "application/json")


def _json(value: object) -> bytes:
    try:
        text = json.dumps(
            value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsendableError(f"this cannot be sent as JSON: {error}") from None


def _plain(value: Any) -> object:
    """What is inside of JSON and is none."""
    if is_tensor(value):
        return value.tolist()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise TypeError(f"there is no JSON for a {type(value).__name__}")


def _query_of(parameters: Mapping[str, object] | None) -> dict[str, str]:
    """Parameters beside a body that has no room for them."""
    query = {name: _json(value).decode() for name, value in (parameters or {}).items()}
    if taken := sorted(set(query) & set(_RESERVED)):
        raise UnsendableError(f"a parameter named {taken[0]!r} can only be sent beside JSON")
    if sum(map(len, [*query, *query.values()])) > _MAX_QUERY_CHARACTERS:
        raise UnsendableError("so long parameters can only be sent beside JSON")
    return query


def _type_of(start: bytes) -> str:
    for magic, content_type in _MAGIC:
        if start.startswith(magic):
            return content_type
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "image/webp"
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1"):
        return "image/avif"
    return "application/octet-stream"


def _is_picture(value: object) -> bool:
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _png_of(image: Any) -> bytes:
    """The same pixels, turned as its EXIF data asks for, as the service does with files."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)  # fast; what it saves further is not worth it here
    return file.getvalue()


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, bytes) and len(part) <= _PIECE_BYTES:
            yield part
        else:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                yield bytes(view[start : start + _PIECE_BYTES])
