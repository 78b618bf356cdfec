"""Pictures that are small as files and cost much to decode, unless a decoder looks first.

`python -m tests.fuzz.bombs` decodes them, and prints what each took.
"""

import io
import json
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.vision.images import decode_image

_EDGE = 7071  # squared, just under the default limit of 50 million pixels


def png_of(*chunks: bytes) -> bytes:
    """Return a PNG file of chunks, each its type and its data."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks
    )


def png_head(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    """Return the first chunk of a PNG."""
    return b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


def white_png(width: int, height: int) -> bytes:
    """Return a PNG with one bit per pixel: 50,000 x 50,000 of them take 1.5 MB."""
    packer = zlib.compressobj(1)
    row = b"\0" + b"\xff" * (-(-width // 8))
    data = b"".join(packer.compress(row * 1000) for _ in range(height // 1000))
    data += packer.compress(row * (height % 1000)) + packer.flush()
    return png_of(png_head(width, height, 1, 0), b"IDAT" + data, b"IEND")


def small_png(*extra: bytes) -> bytes:
    """Return a PNG of 8 x 8 pixels, with further chunks before its pixels."""
    return png_of(png_head(8, 8), *extra, b"IDAT" + zlib.compress(bytes(25 * 8)), b"IEND")


def jpeg(width: int = 64, height: int = 64, **options: object) -> bytes:
    """Return a gray JPEG file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), "gray").save(file, "JPEG", **options)
    return file.getvalue()


def many_scans(width: int, height: int, num_scans: int) -> bytes:
    """Return a progressive JPEG of empty scans; each makes the decoder walk over all blocks."""
    data = jpeg(width, height, progressive=True)
    first = data.index(b"\xff\xda")
    end = data.index(b"\xff\xda", first + 2)
    # One component, coefficients 1 to 63, refined to no end; the entropy coded data is missing.
    empty = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"
    return data[:end] + empty * num_scans + b"\xff\xd9"


def with_segments(*segments: bytes) -> bytes:
    """Return a JPEG with further segments, each its marker and its data."""
    data = jpeg()
    extra = b"".join(b"\xff" + s[:1] + struct.pack(">H", len(s) + 1) + s[1:] for s in segments)
    return data[:2] + extra + data[2:]


def exif_of_overlaps(num_bytes: int) -> bytes:
    """Return EXIF data whose every tag claims all of it."""
    num_tags = min(num_bytes // 24, 65_000)
    head = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", num_tags)
    tags = b"".join(struct.pack(">HHLL", n, 7, num_bytes // 2, 8) for n in range(1, num_tags + 1))
    return (head + tags).ljust(num_bytes, b"\0")


def large_exif(num_bytes: int) -> bytes:
    """Return a JPEG whose EXIF data takes several segments."""
    exif = exif_of_overlaps(num_bytes)[6:]
    pieces = [exif[i : i + 60_000] for i in range(0, len(exif), 60_000)]
    return with_segments(*(b"\xe1Exif\0\0" + piece for piece in pieces))


def tiff_of(tags: Mapping[int, tuple[int, int, int]], rest: bytes = b"") -> bytes:
    """Return a little-endian TIFF file; each tag has a type, a count and a value."""
    head = b"II*\0" + struct.pack("<LH", 8, len(tags))
    body = b"".join(struct.pack("<HHLL", n, *tags[n]) for n in sorted(tags))
    return head + body + b"\0\0\0\0" + rest


def wide_tile(edge: int, compression: int = 8) -> bytes:
    """Return a TIFF of 16 x 16 pixels in one tile that is much larger."""
    tags = {
        256: (4, 1, 16), 257: (4, 1, 16), 258: (3, 1, 8), 259: (3, 1, compression),
        262: (3, 1, 1), 277: (3, 1, 1), 322: (4, 1, edge), 323: (4, 1, edge),
        324: (4, 1, 8), 325: (4, 1, 64),
    }  # fmt: skip
    return tiff_of(tags, zlib.compress(bytes(256)))


def tall_strip(rows: int) -> bytes:
    """Return a TIFF of 16 x 16 pixels whose only strip, deflated, claims many more rows."""
    tags = {
        256: (4, 1, 16), 257: (4, 1, 16), 258: (3, 1, 8), 259: (3, 1, 8), 262: (3, 1, 1),
        273: (4, 1, 134), 277: (3, 1, 1), 278: (4, 1, rows), 279: (4, 1, 64),
    }  # fmt: skip
    return tiff_of(tags, zlib.compress(bytes(1 << 20)))


def animation(form: str, num_frames: int) -> bytes:
    """Return many frames of 8 x 8 pixels."""
    frames = [Image.new("L", (8, 8), n % 251) for n in range(num_frames)]
    file = io.BytesIO()
    frames[0].save(file, form, save_all=True, append_images=frames[1:])
    return file.getvalue()


def huge_webp(width: int, height: int) -> bytes:
    """Return a WebP file of 8 x 8 pixels whose header claims a larger canvas."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "WEBP")
    inner = file.getvalue()[12:]
    frame = bytes(6) + (7).to_bytes(3, "little") * 2 + bytes(4) + inner
    chunks = b"VP8X" + struct.pack("<L", 10) + b"\x02\0\0\0" + size
    chunks += b"ANIM" + struct.pack("<L", 6) + bytes(6)
    chunks += b"ANMF" + struct.pack("<L", len(frame)) + frame
    return b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WEBP" + chunks


def gif_of(*blocks: bytes) -> bytes:
    """Return a GIF file with blocks before its picture."""
    file = io.BytesIO()
    Image.new("P", (8, 8)).save(file, "GIF")
    data = file.getvalue()
    picture = data.index(b",")
    return data[:picture] + b"".join(blocks) + data[picture:]


def _zipped(size: int) -> bytes:
    return zlib.compress(bytes(size), 1)


_MIB = 1 << 20
BOMBS: Mapping[str, Callable[[], bytes]] = {
    "png of 2,500 million pixels": lambda: white_png(50_000, 50_000),
    "png at the limit": lambda: white_png(_EDGE, _EDGE),
    "png of 1 x 49 million pixels": lambda: white_png(1, 49_000_000),
    "png of 49 million x 1 pixels": lambda: white_png(49_000_000, 1),
    "png with a zTXt of 128 MiB": lambda: small_png(b"zTXtk\0\0" + _zipped(1 << 27)),
    "png with 100 zTXt of 1 MB": lambda: small_png(
        *[b"zTXtk%d\0\0" % n + _zipped(1_000_000) for n in range(100)]
    ),
    "png with an iTXt of 128 MiB": lambda: small_png(b"iTXtk\0\1\0\0\0" + _zipped(1 << 27)),
    "png with an iCCP of 128 MiB": lambda: small_png(b"iCCPk\0\0" + _zipped(1 << 27)),
    "png of 200,000 chunks": lambda: small_png(*[b"abCd"] * 200_000),
    "png of 200,000 text chunks": lambda: small_png(*[b"tEXtk\0v"] * 200_000),
    "png of 200,000 empty IDAT": lambda: small_png(*[b"IDAT"] * 200_000),
    "jpeg of 10,000 scans": lambda: many_scans(2000, 2000, 10_000),
    "jpeg of 200 scans": lambda: many_scans(_EDGE, _EDGE, 200),
    "jpeg of 400,000 segments": lambda: with_segments(*[b"\xe5"] * 400_000),
    "jpeg of 400,000 comments": lambda: with_segments(*[b"\xfe"] * 400_000),
    "jpeg with 4 MB of exif": lambda: large_exif(4 * _MIB),
    "jpeg with 64 KB of exif": lambda: large_exif(60_000),
    "tiff with a tile of 100,000 x 100,000": lambda: wide_tile(100_000),
    "tiff with a tile of 30,000 x 30,000": lambda: wide_tile(30_000),
    "tiff with a raw tile of 30,000 x 30,000": lambda: wide_tile(30_000, 1),
    "tiff with a strip of 2**31 rows": lambda: tall_strip(2**31 - 1),
    "tiff of 300 frames": lambda: animation("TIFF", 300),
    "gif of 300 frames": lambda: animation("GIF", 300),
    "webp of 300 frames": lambda: animation("WEBP", 300),
    "apng of 300 frames": lambda: animation("PNG", 300),
    "webp of 16,000 x 16,000": lambda: huge_webp(16_000, 16_000),
    "webp of 13,000 x 13,000": lambda: huge_webp(13_000, 13_000),
    "gif with 16 MB of comments": lambda: gif_of(
        b"!\xfe" + (b"\xff" + bytes(255)) * 64_000 + b"\0"
    ),
    "gif of 500,000 extensions": lambda: gif_of(b"!\x01\0" * 500_000),
    "gif of comments of a byte": lambda: gif_of(b"!\xfe\x01x\0" * 300_000),
}
"""Bombs by name, as functions, since some take a while to make."""


def main() -> None:
    """Decode each bomb in turn, and print a line of JSON with its cost and the outcome."""
    warnings.filterwarnings("ignore", module="PIL")  # as in a worker
    decode_image(jpeg())  # loads libraries, which would count for the first bomb
    for name, make in BOMBS.items():
        data = make()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before_kib, _ = _memory_kib()
        began = time.process_time()  # other processes do not count
        try:
            outcome = str(decode_image(data).size)
        except InputError as error:
            outcome = f"refused: {error}"
        took_s = time.process_time() - began
        mib = (_memory_kib()[1] - before_kib) / 1024
        line = {"name": name, "seconds": took_s, "mib": mib, "outcome": outcome}
        sys.stdout.write(json.dumps(line) + "\n")


def _memory_kib() -> tuple[int, int]:
    """Return the resident memory now and at its peak."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0]: words[1] for words in lines if len(words) > 1}
    return int(found["VmRSS:"]), int(found["VmHWM:"])


if __name__ == "__main__":
    main()
