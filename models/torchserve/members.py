"""Reads the members of archives that nobody has checked: `.mar` (zip) and `.tar.gz`. No torch.

All that is read is bounded, and a member has a plain name below the folder that it goes to, or the
archive is refused as a whole.
"""

import contextlib
import gzip
import io
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from inferpool.models.errors import SourceError

MAX_FILES = 10_000
"""Files and folders in an archive."""
MAX_BYTES = 64 << 30
"""Bytes of all files in it, unpacked."""
MAX_RATIO = 200
"""Unpacked bytes for each packed one. Deflate reaches 1,032 on zeros, and weights about 1.1."""
FREE_BYTES = 64 << 20
"""Unpacked bytes that any archive may have, whatever its ratio."""
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
"""The longest name that file systems have (NAME_MAX of Linux)."""
_MAX_DEPTH = 32
_MAX_READ_BYTES = 4 << 20
"""Most bytes to read at once: a directory of 10,000 files has less, and data come in pieces."""
PIECE_BYTES = 1 << 20
_SMALL_SUFFIXES = (".json", ".yaml", ".yml")
_HEADER_BYTES = 30
"""The least size of a member's own header in a zip (APPNOTE.TXT, 4.3.7)."""
_IS_ENCRYPTED = 0x1 | 0x40
"""Flags of an encrypted member (APPNOTE.TXT, 4.4.4)."""
_MAX_HEADER_BYTES = 64 << 10
"""The longest header of a tar that says more about a member, such as a long name."""
_MAX_LENGTH_CHARS = 8
_FURTHER_HEADERS = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)
_DRIVE = re.compile(r"[A-Za-z]:")
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError,
    RuntimeError, OverflowError, struct.error,
)  # fmt: skip
"""Errors of Python's readers about bytes that are no such archive."""

Member = tuple[str, int, BinaryIO | None]
"""The name, the bytes and the content of a member; None for a folder."""


class ArchiveReader(Protocol):
    """An archive that is open."""

    def files(self) -> dict[str, int]:
        """Return the bytes of each file, once all members have been checked.

        Raises:
            SourceError: The archive is not safe to unpack.
        """

    def members(self) -> Iterator[Member]:
        """Yield each member that was checked; its content must be read before the next one.

        Raises:
            SourceError: The archive is not safe to unpack.
        """

    def read(self, name: str, most: int) -> bytes:
        """Read a small file.

        Raises:
            SourceError: It has more bytes than that, or is damaged.
        """


@contextlib.contextmanager
def opened_archive(path: Path) -> Iterator[ArchiveReader]:
    """Open an archive by what its first bytes are.

    Raises:
        SourceError: There is no such file, or it is neither a zip nor a .tar.gz, or the reading of
            it fails.
    """
    try:
        if not path.is_file():
            raise SourceError(f"there is no file {path} (looked for from {Path.cwd()})")
        with path.open("rb") as file, reading(path, file) as reader:
            yield reader
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def reading(path: Path, file: BinaryIO) -> Iterator[ArchiveReader]:
    """Read an archive from a file that is open; `path` names it in errors."""
    head = file.read(4)
    file.seek(0)
    try:
        if head.startswith(b"PK"):
            with zipfile.ZipFile(_Bounded(file, path)) as archive:
                yield _ZipReader(path, archive, _size_of(file))
        elif head.startswith(b"\x1f\x8b"):
            yield _TarReader(path, file, _size_of(file))
        else:
            raise SourceError(f"{path} is neither a zip (.mar) nor a .tar.gz")
    except _BROKEN as error:
        raise SourceError(
            f"{path} is damaged or cut short, or no archive: {str(error)[:200]}; copy or download "
            "it again"
        ) from None


def fault_of_name(name: str) -> str:
    """Return why a member's name is refused; empty if it is a plain path below a folder."""
    if not name:
        return "is empty"
    if any(unicodedata.category(each).startswith("C") for each in name):
        return "has a control character in it"
    if "\\" in name:
        return "has a backslash in it"
    if name.startswith("/") or _DRIVE.match(name):
        return "is an absolute path"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "does not name a place below the archive's folder"
    if len(parts) > _MAX_DEPTH:
        return f"has more than {_MAX_DEPTH} parts"
    if len(name.encode()) > _MAX_NAME_BYTES or any(
        len(part.encode()) > _MAX_PART_BYTES for part in parts
    ):
        return "is too long"
    return ""


def shown_name(name: str) -> str:
    """Return a name for errors: short, and without control characters."""
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:97]}..."


class _Names:
    """Checks the names and sizes of the members of one archive, one after another."""

    def __init__(self, path: Path, num_packed: int) -> None:
        self._path = path
        self._most = min(MAX_BYTES, MAX_RATIO * num_packed + FREE_BYTES)
        self._kinds: dict[str, bool] = {}
        """True for a folder; by the name as file systems that ignore case have it."""
        self._given: set[str] = set()
        self._num_bytes = 0

    def check(self, name: str, num_bytes: int, *, is_folder: bool) -> None:
        """Check the next member.

        Raises:
            SourceError: It is refused, and the archive with it.
        """
        if fault := fault_of_name(name):
            raise self.refusal(name, f"its name {fault}")
        if num_bytes < 0:
            raise self.refusal(name, "its size is negative")
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise self.refusal(
                name,
                f"with it the archive unpacks to more than {self._most >> 20:,} MiB (the bounds "
                f"are {MAX_BYTES >> 30} GiB, and {MAX_RATIO} times the archive's own size)",
            )
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in self._given:
            raise self.refusal(name, "another member has this name")
        self._given.add(folded)
        if self._kinds.setdefault(folded, is_folder) != is_folder:
            raise self.refusal(name, "it is a file and a folder at once")
        above = folded
        while above := above.rpartition("/")[0]:
            if not self._kinds.setdefault(above, True):
                raise self.refusal(name, "it lies below a file")
        if len(self._kinds) > MAX_FILES:  # a name may have folders that no member is
            raise SourceError(
                f"{self._path} has more than {MAX_FILES:,} files and folders: it is refused"
            )

    def refusal(self, name: str, why: str) -> SourceError:
        """Return the error about a member."""
        return SourceError(
            f"{self._path}: the member {shown_name(name)} is refused: {why}. Nothing was unpacked; "
            "make the archive again with torch-model-archiver"
        )


class _ZipReader:
    def __init__(self, path: Path, archive: zipfile.ZipFile, num_packed: int) -> None:
        self._path = path
        self._archive = archive
        self._num_packed = num_packed

    def files(self) -> dict[str, int]:
        return {info.filename: info.file_size for info in self._checked() if not info.is_dir()}

    def members(self) -> Iterator[Member]:
        for info in self._checked():
            if info.is_dir():
                yield info.filename.rstrip("/"), 0, None
                continue
            with self._archive.open(info) as content:
                yield info.filename, info.file_size, _as_file(content)

    def read(self, name: str, most: int) -> bytes:
        info = self._archive.getinfo(name)
        if info.file_size > most:
            raise SourceError(f"{self._path}: {name} has more than {most >> 20} MiB")
        with self._archive.open(info) as content:
            return content.read(most + 1)

    def _checked(self) -> list[zipfile.ZipInfo]:
        """Return the members, once all have been checked by what the archive's directory says."""
        names = _Names(self._path, self._num_packed)
        infos = self._archive.infolist()
        for info in infos:
            name = info.orig_filename
            if why := fault_of_name(name.removesuffix("/")):
                raise names.refusal(name, f"its name {why}")
            if why := _fault_of(info):
                raise names.refusal(name, why)
            names.check(name.removesuffix("/"), info.file_size, is_folder=info.is_dir())
        end = 0
        for info in sorted(infos, key=lambda each: each.header_offset):
            if info.header_offset < end:
                raise names.refusal(info.filename, "its bytes are those of another member too")
            end = info.header_offset + _HEADER_BYTES + info.compress_size
        return infos


def _fault_of(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & _IS_ENCRYPTED:
        return "it is encrypted; archives without a password are served"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is packed otherwise than by deflate"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "it is a link"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "it is a device, a pipe or a socket"
    if (kind == stat.S_IFDIR) and not info.is_dir():
        return "it is a folder by its mode, and a file by its name"
    if info.is_dir() and info.file_size:
        return "it is a folder with content"
    return ""


class _TarReader:
    """Reads a `.tar.gz`; TorchServe leaves out the first part of each name, so we do."""

    def __init__(self, path: Path, file: BinaryIO, num_packed: int) -> None:
        self._path = path
        self._file = file
        self._num_packed = num_packed
        self._small: dict[str, bytes] = {}
        """Files that are likely to be read next: each look for one unpacks all before it."""

    def files(self) -> dict[str, int]:
        found: dict[str, int] = {}
        left = _MAX_READ_BYTES
        for name, size, content in self.members():
            if content is None:
                continue
            found[name] = size
            if name.endswith(_SMALL_SUFFIXES) and size <= left:
                self._small[name] = content.read(size)
                left -= size
        return found

    def members(self) -> Iterator[Member]:
        names = _Names(self._path, self._num_packed)
        self._file.seek(0)
        with gzip.GzipFile(fileobj=self._file) as unpacked:
            for info in self._headers(unpacked):
                root, _, name = info.name.removeprefix("./").partition("/")
                if info.isdir() and not name:
                    continue
                if not info.isdir() and (not info.isreg() or info.type == tarfile.GNUTYPE_SPARSE):
                    kind = "a link" if info.issym() or info.islnk() else "no plain file"
                    raise names.refusal(info.name, f"it is {kind}")
                if root == ".." or info.name.startswith("/"):
                    raise names.refusal(info.name, f"its name {fault_of_name(info.name)}")
                size = 0 if info.isdir() else info.size
                names.check(name, size, is_folder=info.isdir())
                content = _Section(unpacked, size)
                yield name, size, None if info.isdir() else _as_file(content)
                content.skip()
                _Section(unpacked, -size % tarfile.BLOCKSIZE).skip()

    def _headers(self, unpacked: gzip.GzipFile) -> Iterator[tarfile.TarInfo]:
        """Yield what the archive says about each member; its content must be read before the next.

        `tarfile` itself would spend minutes, or gigabytes, on headers that are made for it.
        """
        left = FREE_BYTES
        said: dict[str, str] = {}
        while any(block := unpacked.read(tarfile.BLOCKSIZE)):
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            is_further = info.type in _FURTHER_HEADERS
            padded = info.size + -info.size % tarfile.BLOCKSIZE if is_further else 0
            left -= len(block) + padded
            if left < 0 or not 0 <= padded <= _MAX_HEADER_BYTES:
                raise SourceError(f"{self._path} is refused: a header in it is too large")
            body = unpacked.read(padded)[: info.size] if is_further else b""
            if info.type == tarfile.GNUTYPE_LONGNAME:
                said["path"] = body.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                said |= _records_of(body)
            elif not is_further:
                if any(key.startswith("GNU.sparse.") for key in said):
                    info.type = tarfile.GNUTYPE_SPARSE
                info.name = said.get("path", info.name)
                info.name = info.name.rstrip("/") if info.isdir() else info.name
                info.size = int(said.get("size", info.size))
                yield info
                said = {}

    def read(self, name: str, most: int) -> bytes:
        if name in self._small and len(self._small[name]) <= most:
            return self._small[name]
        for found, size, content in self.members():
            if found == name and content is not None:
                if size > most:
                    raise SourceError(f"{self._path}: {name} has more than {most >> 20} MiB")
                return content.read(most + 1)
        raise SourceError(f"{self._path}: there is no {name} in it")


def _records_of(header: bytes) -> dict[str, str]:
    """Return the records of an extended header: `LENGTH KEY=VALUE` each (POSIX, pax).

    Raises:
        ValueError: It is no such header.
    """
    found = {}
    while header.rstrip(b"\0"):
        length = int(header[:_MAX_LENGTH_CHARS].partition(b" ")[0])
        if not 0 < length <= len(header):
            raise ValueError("a record of an extended header has a wrong length")
        record, header = header[:length], header[length:]
        text = record.partition(b" ")[2].removesuffix(b"\n").decode("utf-8", "surrogateescape")
        key, _, found[key] = text.partition("=")
    return found


class _Section:
    """The content of one member of a tar."""

    def __init__(self, file: gzip.GzipFile, num_bytes: int) -> None:
        self._file = file
        self._left = num_bytes

    def read(self, size: int) -> bytes:
        content = self._file.read(min(size, self._left))
        self._left -= len(content)
        return content

    def skip(self) -> None:
        while self._left:
            if not self.read(PIECE_BYTES):
                raise EOFError("a member is cut short")


class _Bounded(io.RawIOBase):
    """A file that is never read by more than 4 MiB at once."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__()
        self._file = file
        self._path = path

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(
            min(size, _MAX_READ_BYTES + 1) if size >= 0 else _MAX_READ_BYTES + 1
        )
        if len(content) > _MAX_READ_BYTES:
            raise SourceError(f"{self._path} is refused: its directory is too large")
        return content

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _as_file(content: object) -> BinaryIO:
    return content  # type: ignore[return-value]  # both readers give one of bytes


def _size_of(file: BinaryIO) -> int:
    place = file.tell()
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(place)
    return num_bytes
