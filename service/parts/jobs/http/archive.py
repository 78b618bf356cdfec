"""Reads tar archives from front to back, in bounded memory: each regular file, in its order.

Python's `tarfile` does not suit bodies of strangers: it keeps the header of each member, holds
extended headers of any length, and accepts an archive that is cut off or damaged between two
members. The formats are those of POSIX (pax and ustar), of GNU tar and of V7.
"""

import os
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MAX_EXTENDED_BYTES = 2**20
"""The longest extended header; libarchive's limit is the same."""
_PIECE_BYTES = 256 * 1024

_FILES = (b"0", b"\0", b"7")
_SPARSE = b"S"
_LINKS = (b"1", b"2")
_WITHOUT_CONTENT = (*_LINKS, b"3", b"4", b"5", b"6")
"""Types of members that have no blocks of content, whatever their size says."""
_CONTINUED = b"M"

_COMPRESSED: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip (gunzip)",
    b"BZh": "bzip2 (bunzip2)",
    b"\xfd7zXZ\0": "xz (unxz)",
    b"\x28\xb5\x2f\xfd": "zstd (unzstd)",
}
"""How compressed files begin, and what made and unpacks them."""


class ArchiveFile(NamedTuple):
    """A file of an archive, or why it cannot be read."""

    name: str
    """For messages only: it may be any path."""
    content: bytes = b""
    problem: ServiceError | None = None


class _Header(NamedTuple):
    name: str
    type: bytes
    num_bytes: int
    """Length of the content in the archive."""
    is_sparse: bool = False


def read_archive(file: BinaryIO, most_bytes: int) -> Iterator[ArchiveFile]:
    """Yield the files of a tar archive. Nothing is ever written to the paths in it.

    A hard or symbolic link is a file that cannot be read: a client that meant a file there would
    miss its answer. Folders and devices are left out.

    Args:
        file: The archive, from its beginning.
        most_bytes: The longest file; a longer one is skipped and has a problem.

    Raises:
        BadRequestError: It is no archive, ends early, or is damaged.
        UnsupportedTypeError: It is compressed.
    """
    archive = _Archive(file)
    while (header := archive.next_header()) is not None:
        name, num_bytes = header.name, header.num_bytes
        if header.type in _LINKS:
            problem: ServiceError = InvalidInputError(
                "is a link; make the archive with tar --dereference --hard-dereference"
            )
            yield ArchiveFile(name, problem=problem)
        elif header.is_sparse:
            archive.skip(num_bytes)
            problem = UnsupportedTypeError("is sparse; make the archive without --sparse")
            yield ArchiveFile(name, problem=problem)
        elif header.type not in _FILES or (header.type == b"\0" and name.endswith("/")):
            archive.skip(0 if header.type in _WITHOUT_CONTENT else num_bytes)
        elif num_bytes > most_bytes:
            archive.skip(num_bytes)
            problem = TooLargeError(
                f"has {num_bytes} bytes; the limit for an instance is {most_bytes} (the setting "
                "max_body_bytes)"
            )
            yield ArchiveFile(name, problem=problem)
        else:
            yield ArchiveFile(name, archive.read(num_bytes))


class _Archive:
    """The position in an archive. All lengths are checked against that of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        """Bytes that have not been read."""
        self._is_begun = False

    def next_header(self) -> _Header | None:
        """Return the header of the next member, or None at the end of the archive."""
        extended = _Extended()
        while True:
            block = self._begin() if not self._is_begun else self.read(_BLOCK)
            if block == _ZEROS:
                if extended.is_any:
                    raise BadRequestError("the archive: ends after an extended header")
                self._check_end()
                return None
            header = _read_header(block)
            if header.type in (b"L", b"K", b"x", b"X"):
                extended.take(header.type, self._read_extended(header.num_bytes))
            elif header.type == b"g":  # such as git's: it says nothing about single members
                self.skip(header.num_bytes)
            elif header.type == _CONTINUED:
                raise BadRequestError("the archive: is one of several volumes; send it whole")
            else:
                if header.type == _SPARSE:
                    self._skip_sparse_map(block)
                return extended.apply(header)

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, and leave out the padding to a whole block."""
        self._take(num_bytes)
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise _cut_off()
        self._file.seek(-num_bytes % _BLOCK, os.SEEK_CUR)
        return content

    def skip(self, num_bytes: int) -> None:
        """Leave out the next bytes, and the padding to a whole block."""
        self._take(num_bytes)
        self._file.seek(num_bytes + -num_bytes % _BLOCK, os.SEEK_CUR)

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes + -num_bytes % _BLOCK
        if self._left < 0:
            raise _cut_off()

    def _begin(self) -> bytes:
        """Return the first block, if the file begins like an archive."""
        self._is_begun = True
        start = self._file.read(_BLOCK)
        for magic, program in _COMPRESSED.items():
            if start.startswith(magic):
                raise UnsupportedTypeError(
                    f"the archive is compressed with {program}; unpack it to a plain tar first"
                )
        if len(start) < _BLOCK or (start != _ZEROS and not _has_checksum(start)):
            raise BadRequestError("the body is no tar archive")
        self._left -= _BLOCK
        return start

    def _read_extended(self, num_bytes: int) -> bytes:
        if num_bytes > _MAX_EXTENDED_BYTES:
            raise BadRequestError(
                f"the archive: an extended header is longer than {_MAX_EXTENDED_BYTES} bytes"
            )
        return self.read(num_bytes)

    def _skip_sparse_map(self, block: bytes) -> None:
        """Skip the blocks that list more holes of a sparse file of GNU tar."""
        is_extended = block[482]
        while is_extended:
            is_extended = self.read(_BLOCK)[504]

    def _check_end(self) -> None:
        """Check that nothing follows the end: its members would be lost without a word."""
        while piece := self._file.read(_PIECE_BYTES):
            if piece.count(0) < len(piece):
                raise BadRequestError(
                    "the archive: there is something after its end; join archives with "
                    "tar --concatenate"
                )


class _Extended:
    """The extended headers before one member."""

    def __init__(self) -> None:
        self.is_any = False
        self._name: bytes | None = None
        self._num_bytes: int | None = None
        self._is_sparse = False

    def take(self, type: bytes, text: bytes) -> None:
        """Read an extended header: a long name of GNU tar, or the records of POSIX."""
        self.is_any = True
        if type == b"L":
            self._name = text.partition(b"\0")[0]
        elif type != b"K":
            for key, value in _read_records(text):
                if key == b"path":
                    self._name = value
                elif key == b"size":
                    self._num_bytes = _read_digits(value, 10)
                elif key.startswith(b"GNU.sparse."):
                    self._is_sparse = True

    def apply(self, header: _Header) -> _Header:
        """Return the header of the member as they say it is."""
        name = header.name if self._name is None else _text(self._name)
        num_bytes = header.num_bytes if self._num_bytes is None else self._num_bytes
        is_sparse = self._is_sparse or header.type == _SPARSE
        return header._replace(name=name, num_bytes=num_bytes, is_sparse=is_sparse)


def _read_header(block: bytes) -> _Header:
    """Read a header block (POSIX.1-2017, pax, "ustar Interchange Format")."""
    if not _has_checksum(block):
        raise BadRequestError("the archive: is damaged; there is no header where one must be")
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0":  # GNU tar has other fields in the place of the prefix
        prefix = block[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    return _Header(_text(name), block[156:157], _read_number(block[124:136]))


def _has_checksum(block: bytes) -> bool:
    """Return whether a block's checksum is right; some old programs summed signed bytes."""
    rest = block[:148] + block[156:]
    total = sum(rest) + 8 * ord(" ")
    digits = block[148:156].partition(b"\0")[0].strip(b" ")
    if not digits or digits.strip(b"01234567"):
        return False
    expected = int(digits, 8)
    return expected == total or expected == total - 256 * sum(byte > 127 for byte in rest)


def _read_number(field: bytes) -> int:
    """Read a length: octal digits, or binary as GNU tar writes what is too long for them."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") - (0x80 << 8 * len(field) - 8)
    return _read_digits(field.partition(b"\0")[0].strip(b" ") or b"0", 8)


def _read_digits(text: bytes, base: int) -> int:
    if not text or len(text) > 20 or text.strip(b"0123456789"[:base]):
        raise BadRequestError(f"the archive: is damaged; {text[:24]!r} is no length")
    return int(text, base)


def _read_records(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records of a pax header: length, space, key, "=", value and a line feed.

    The length is that of the whole record.
    """
    start = 0
    while start < len(text):
        space = text.find(b" ", start, start + 21)
        length = _read_digits(text[start : max(start, space)], 10)
        end = start + length
        record = text[space + 1 : end]
        key, equals, value = record[:-1].partition(b"=")
        if space < 0 or end > len(text) or not equals or not record.endswith(b"\n"):
            raise BadRequestError("the archive: is damaged; an extended header cannot be read")
        yield key, value
        start = end


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _cut_off() -> BadRequestError:
    return BadRequestError("the archive: ends early; send all of it, with the blocks at its end")
