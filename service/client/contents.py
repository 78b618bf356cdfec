"""Contents that a model answers with in place of JSON, such as pictures; names of their files."""

import base64
import binascii
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from .texts import escape

ENDINGS: Mapping[str, str] = {
    "application/geo+json": ".geojson",
    "application/gzip": ".gz",
    "application/octet-stream": ".bin",
    "application/pdf": ".pdf",
    "application/x-npy": ".npy",
    "application/xml": ".xml",
    "application/zip": ".zip",
    "audio/flac": ".flac",
    "audio/mp4": ".m4a",
    "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg",
    "audio/wav": ".wav",
    "audio/x-wav": ".wav",
    "image/apng": ".png",
    "image/avif": ".avif",
    "image/bmp": ".bmp",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/svg+xml": ".svg",
    "image/tiff": ".tif",
    "image/webp": ".webp",
    "text/csv": ".csv",
    "text/html": ".html",
    "text/markdown": ".md",
    "text/plain": ".txt",
    "video/mp4": ".mp4",
    "video/webm": ".webm",
}
"""Endings of files by media type. A model has no other say in the name of a file."""
_OTHER = ".bin"


class ReceivedContent(bytes):
    """The bytes of a content, with its media type."""

    media_type: str
    """Such as "image/png", with its parameters if it has any."""

    def __new__(
        cls, data: bytes, media_type: str = "application/octet-stream"
    ) -> "ReceivedContent":
        """Copy the bytes."""
        content = super().__new__(cls, data)
        content.media_type = media_type
        return content

    @property
    def ending(self) -> str:
        """Ending for a file of this type, such as ".png"; ".bin" for types without one."""
        return ENDINGS.get(self.media_type.partition(";")[0].strip().lower(), _OTHER)

    @property
    def document(self) -> dict[str, str]:
        """The content as it stands in JSON."""
        return {"b64": base64.b64encode(self).decode(), "media_type": self.media_type}

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the bytes to a file, and return its path.

        Raises:
            OSError: It cannot be written.
        """
        file = Path(path)
        file.write_bytes(self)
        return file

    def file_beside(self, path: Path, index: int) -> dict[str, str]:
        """Write the bytes to a file of a folder beside a file of lines; return what a line has.

        The file is named by the number of the input and its type, never by what a model says.

        Raises:
            OSError: It cannot be written.
        """
        folder = path.with_name(f"{path.name}.files")
        folder.mkdir(exist_ok=True)
        draft = self.save(folder / f"{index}{self.ending}.tmp")
        file = draft.rename(folder / f"{index}{self.ending}")
        return {"file": f"{folder.name}/{file.name}", "media_type": self.media_type}

    def __repr__(self) -> str:
        """Show its type and size, rather than all of it."""
        return f"<{self}>"

    def __str__(self) -> str:
        """Describe it for people."""
        return f"{escape(self.media_type)}, {len(self):,} bytes"


def content_in(value: object) -> ReceivedContent | None:
    """Return the content that a prediction is, also as it stands in JSON; None if it is none."""
    match value:
        case ReceivedContent():
            return value
        case {"b64": str(text), "media_type": str(media_type), **rest} if not rest:
            try:
                return ReceivedContent(base64.b64decode(text, validate=True), media_type)
            except (binascii.Error, ValueError):
                return None
    return None
