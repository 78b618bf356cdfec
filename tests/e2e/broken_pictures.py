"""Broken pictures of the kinds that Pillow keeps for its own tests, made of real photographs."""

import functools
import io
import struct
import zlib
from collections.abc import Mapping

import numpy as np
import skimage.data
from PIL import Image

_FORMATS = {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP"}


@functools.cache
def broken_pictures() -> Mapping[str, bytes]:
    """Return pictures by file name: cut, with other bytes, of no size, or much too large."""
    photo = Image.fromarray(skimage.data.chelsea())
    whole = {}
    for suffix, format in _FORMATS.items():
        file = io.BytesIO()
        photo.save(file, format)
        whole[suffix] = file.getvalue()
    found = {"a jpeg.png": whole["jpg"], "a text.jpg": b"no picture\n", "empty.jpg": b""}
    for suffix, data in whole.items():
        for length in (1, 10, 40, len(data) // 3):
            found[f"cut at {length}.{suffix}"] = data[:length]
        found[f"head of others.{suffix}"] = data[:8] + b"\xff" * 60 + data[68:]
        found[f"zeros.{suffix}"] = data[:8] + bytes(len(data) - 8)
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, len(whole["png"]) - 60, np.uint8).tobytes()
    found["noise.png"] = whole["png"][:60] + noise
    png, jpg, bmp, gif = (bytearray(whole[each]) for each in ("png", "jpg", "bmp", "gif"))
    for name, width, height in (("no", 0, 0), ("narrow no", 0, 300), ("huge", 1 << 20, 1 << 20)):
        found[f"{name} size.png"] = _with_size(png, width, height)
        frame = jpg.index(b"\xff\xc0")
        found[f"{name} size.jpg"] = _put(jpg, frame + 5, ">HH", height & 0xFFFF, width & 0xFFFF)
        found[f"{name} size.bmp"] = _put(bmp, 18, "<ii", width, height)
    found["huge size.gif"] = _put(gif, 6, "<HH", 65535, 65535)
    del found["huge size.jpg"]  # whose sizes have 16 bits: it is no size again
    del found["head of others.gif"]  # which has other colours
    found["crc.png"] = bytes(png[:29]) + b"\0\0\0\0" + bytes(png[33:])
    found["bomb.png"] = _bomb(30_000)
    return found


def _with_size(png: bytearray, width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">II", width, height) + bytes(png[24:29])
    return bytes(png[:12]) + head + struct.pack(">I", zlib.crc32(head)) + bytes(png[33:])


def _put(data: bytearray, at: int, form: str, *numbers: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, *numbers)
    return bytes(changed)


def _bomb(edge: int) -> bytes:
    """Return a PNG of a few kilobytes with 900 million pixels."""

    def part(name: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    rows = zlib.compress(bytes((1 + edge // 8) * 1000))
    head = struct.pack(">IIBBBBB", edge, edge, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")
