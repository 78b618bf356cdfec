"""What is sent: files, synthetic images or texts, or JSON, as bodies with their content types."""

import io
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.load.errors import LoadError

CONTENT_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".json": "application/json",
    ".npy": "application/x-npy",
    ".safetensors": "application/safetensors",
    ".bin": "application/octet-stream",
}
"""By the suffix of a file."""
_MAX_BYTES = 512 * 2**20
_NUM_IMAGES = 8
"""Synthetic images that differ, so that no cache on the way answers for the model."""
_SQUARE = 32
_NUM_TEXTS = 256
_TEXT_SIGMA = 0.9
"""Of the logarithm of their lengths: as questions and paragraphs have together."""
_MAX_WORDS = 1000
_VOCABULARY = (
    "the of and a to in is you that it he was for on are with as his they be at one have this from "
    "had by no word but what some we can out other were all there when up use your how said each "
    "she which do their time if will way about many then them write would like so these her long"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One request body."""

    content: bytes
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where bodies come from. Every generator process makes them for itself."""

    files: Sequence[Path] = ()
    content_type: str | None = None
    """Of the files, where their suffixes do not tell."""
    image: tuple[int, int] | None = None
    """Width and height of synthetic JPEGs."""
    json_text: str | None = None
    text_words: int | None = None
    """The median length of synthetic texts."""
    instances: int = 1
    """In each body."""
    seed: int = 0

    def bodies(self) -> list[Body]:
        """Read or make them.

        Raises:
            LoadError: A file cannot be read or sent.
        """
        if self.image:
            singles = _images(*self.image, self.seed)
        elif self.text_words is not None:
            return _texts(self.text_words, self.instances, self.seed)
        elif self.json_text is not None:
            content = self.json_text.encode()
            singles = [Body(content=content, content_type="application/json")]
        else:
            singles = [self._read(file) for file in self.files]
        if self.instances == 1:
            return singles
        return [_repeated(body, self.instances) for body in singles]

    def _read(self, file: Path) -> Body:
        content_type = self.content_type or CONTENT_TYPES.get(file.suffix.lower())
        if content_type is None:
            raise LoadError(
                f"{file}: its suffix does not tell what it is; say --content-type, "
                f"or use one of {' '.join(CONTENT_TYPES)}"
            )
        try:
            return Body(content=file.read_bytes(), content_type=content_type)
        except OSError as error:
            raise LoadError(f"{file}: {error.strerror}") from error


def find_files(path: Path) -> list[Path]:
    """A file, or all the files of a folder whose suffixes are known.

    Raises:
        LoadError: There is none, or there are too many to keep in memory.
    """
    if not path.exists():
        raise LoadError(f"{path}: there is no such file or folder")
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in CONTENT_TYPES)
    if not files:
        raise LoadError(f"{path}: no file ends in one of {' '.join(CONTENT_TYPES)}")
    if (num_bytes := sum(file.stat().st_size for file in files)) > _MAX_BYTES:
        raise LoadError(
            f"{path}: {num_bytes / 2**20:,.0f} MiB; all of it is kept in memory, "
            f"so {_MAX_BYTES // 2**20} MiB is the most"
        )
    return files


def _images(width: int, height: int, seed: int) -> list[Body]:
    """JPEGs of coloured squares with some noise: about as large as photographs of their size."""
    # Here, so that generators that send no synthetic images start in half the time.
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
        bodies.append(Body(content=file.getvalue(), content_type="image/jpeg"))
    return bodies


def _texts(median: int, num_instances: int, seed: int) -> list[Body]:
    """Random words, whose lengths are log-normal; those of a body differ."""
    random = Random(seed)
    words = _VOCABULARY.split()

    def text() -> str:
        num_words = round(median * math.exp(random.gauss(0, _TEXT_SIGMA)))
        return " ".join(random.choices(words, k=min(max(num_words, 1), _MAX_WORDS)))

    return [
        Body(
            content=json.dumps({"instances": [text() for _ in range(num_instances)]}).encode(),
            content_type="application/json",
        )
        for _ in range(_NUM_TEXTS)
    ]


def _repeated(body: Body, num: int) -> Body:
    if body.content_type == "application/json":
        return _repeated_json(body, num)
    if body.content_type == "application/safetensors":
        raise LoadError("--instances: not for safetensors; stack the tensors in the file itself")
    boundary = secrets.token_hex(16)
    part = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
        f"Content-Type: {body.content_type}\r\n\r\n"
    ).encode()
    content = (part + body.content + b"\r\n") * num + f"--{boundary}--\r\n".encode()
    return Body(content=content, content_type=f"multipart/form-data; boundary={boundary}")


def _repeated_json(body: Body, num: int) -> Body:
    try:
        document = json.loads(body.content)
        instances = document["instances"]
        whole = {**document, "instances": (instances * num)[:num]}
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError('--instances: the JSON must be {"instances": [...]}') from error
    return Body(content=json.dumps(whole).encode(), content_type=body.content_type)
