"""Checks of an encoded picture's structure, before Pillow decodes it. Worker processes only.

A decoder does what the file says: it walks over the whole picture once for each scan, reads
millions of empty chunks, and allocates the canvas that a header claims. These checks cost far less,
and refuse what no camera and no encoder writes.
"""

import re
from collections.abc import Callable

from inferpool.models.errors import InputError

MAX_EXIF_BYTES = 1 << 16
"""Exif 2.3, 4.5.4: it must fit into one segment of a JPEG file."""
_MAX_SCANS = 100
"""Encoders make about 10. At 50 million pixels each costs 8 ms, and takes 10 bytes to ask for."""
_MAX_STRAY_BYTES = 1 << 16

_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
"""The marker that ends entropy-coded data: neither a stuffed zero nor RST0 to RST7."""
_SOF = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_ONE_SCAN_SOF = (0xC0, 0xC1)
"""Sequential JPEGs: if the first scan has every component, no other is read."""
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))


def check_container(form: str | None, data: bytes, check_size: Callable[[int, int], None]) -> None:
    """Refuse a file that costs far more to decode than its picture is worth.

    The decoder itself reports mere damage.

    Args:
        form: The format, as Pillow calls it.
        data: The whole file.
        check_size: Called with the size of a canvas that opening the file would allocate.

    Raises:
        InputError: The file is refused; the message says why.
    """
    if form == "JPEG":
        _check_jpeg(data)
    elif form == "PNG":
        _check_png(data)
    elif form == "GIF":
        _check_gif(data)
    elif form == "WEBP":
        check_size(*_webp_size(data))


def check_exif(num_bytes: int) -> None:
    """Refuse more EXIF metadata than the standard allows.

    Raises:
        InputError: There is more.
    """
    if num_bytes > MAX_EXIF_BYTES:
        raise InputError(
            f"the image has {num_bytes:,} bytes of EXIF metadata; at most {MAX_EXIF_BYTES:,} are "
            "taken"
        )


def png_bits(data: bytes) -> tuple[int, int]:
    """Return the bits of a PNG's samples, and how many of them are significant (its sBIT chunk).

    `check_container` has bounded its chunks.
    """
    num_bits = data[24] if len(data) > 24 else 8
    position = 8
    while (kind := data[position + 4 : position + 8]) not in (b"", b"IDAT"):
        if kind == b"sBIT" and len(data) > position + 8 and data[position + 8] > 0:
            return num_bits, min(num_bits, data[position + 8])
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return num_bits, num_bits


def _max_pieces(data: bytes) -> int:
    """Return a limit for chunks, segments or blocks, which cost Pillow up to 5 us each.

    Encoders fill each with 4 KiB or more, and so make far fewer.
    """
    return 10_000 + len(data) // 1024


def _too_many(what: str) -> InputError:
    return InputError(f"the image is made of too many {what}")


def _check_jpeg(data: bytes) -> None:
    position, num_segments, num_stray, exif_bytes, num_scans = 2, 0, 0, 0, 0
    num_components = 0
    is_sequential = False
    max_segments = _max_pieces(data)
    while (match := _MARKER.search(data, position)) is not None:
        if not num_scans:  # between segments, where nothing else belongs
            num_stray += match.end() - 2 - position
        marker, position = match[1][0], match.end()
        num_segments += 1
        if num_segments > max_segments or num_stray > _MAX_STRAY_BYTES:
            raise _too_many("segments")
        if marker == 0xD9:
            return
        if marker in _NO_LENGTH:
            continue
        length = int.from_bytes(data[position : position + 2], "big")
        if marker == 0xE1 and data.startswith(b"Exif\0\0", position + 2):
            exif_bytes += length - 8
            check_exif(exif_bytes)
        elif marker in _SOF:
            num_components = data[position + 7] if position + 7 < len(data) else 0
            is_sequential = marker in _ONE_SCAN_SOF
        elif marker == 0xDA:
            num_scans += 1
            if is_sequential and data[position + 2 : position + 3] == bytes((num_components,)):
                return
            if num_scans > _MAX_SCANS:
                raise _too_many(f"scans: more than {_MAX_SCANS}")
        position += max(length, 2)


def _check_png(data: bytes) -> None:
    position, num_chunks = 8, 0
    max_chunks = _max_pieces(data)
    while position + 8 <= len(data):
        num_chunks += 1
        if num_chunks > max_chunks:
            raise _too_many("chunks")
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _check_gif(data: bytes) -> None:
    """Check up to the first picture, since only that is decoded."""
    flags = data[10] if len(data) > 10 else 0
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    num_blocks = 0
    max_blocks = _max_pieces(data)
    while position < len(data) and data[position] not in b",;":
        num_blocks += 1
        if data[position] == 0x21:  # an extension: its label, and blocks up to an empty one
            position += 2
            while num_blocks <= max_blocks and position < len(data) and data[position]:
                num_blocks += 1
                position += 1 + data[position]
        position += 1  # the empty block, or what Pillow skips a byte at a time
        if num_blocks > max_blocks:
            raise _too_many("blocks")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size in the header (RFC 9649, 2.5 to 2.7), which opening the file allocates."""
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return (
            int.from_bytes(data[24:27], "little") + 1,
            int.from_bytes(data[27:30], "little") + 1,
        )
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a" and len(data) >= 30:
        return (
            int.from_bytes(data[26:28], "little") & 0x3FFF,
            int.from_bytes(data[28:30], "little") & 0x3FFF,
        )
    if kind == b"VP8L" and data[20:21] == b"\x2f" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise InputError("the WEBP image cannot be decoded: its header is damaged or cut off")
