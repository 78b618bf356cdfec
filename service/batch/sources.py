"""Sources of the inputs of a run. Any process can read any input by its index.

A source stores paths and offsets, and opens its files in each process that reads. So it can be sent
to readers.
"""

import csv
import glob
import hashlib
import json
import os
import posixpath
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inferpool.service.api.codecs.names import kind_by_name
from inferpool.service.batch.inputs import (
    BatchInput,
    SourceUnusableError,
    failed_input,
    input_at,
    input_of,
    piece_of,
    stamp_of,
    unreadable_input,
)
from inferpool.service.batch.tables import TABLE_SUFFIXES, open_table

_LISTS = (".txt", ".lst", ".list")
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_LABELS = ("cls", "label", "json")
"""Endings of the members of a tar that hold the right answer, the surest first."""
_LABEL_KEYS = ("label", "cls", "class")
_END_BYTES = 1 << 16
"""Bytes to check behind the end of a tar. Archivers fill up to 10 KiB with zeros."""


class BatchSource(Protocol):
    """Inputs in a fixed order, with random access. It can be pickled."""

    def __len__(self) -> int:
        """Return the number of inputs."""

    def name(self, index: int) -> str:
        """Return the name of an input; empty if the input must be read for it."""

    def stamps(self) -> Iterator[str]:
        """Yield texts; one of them changes with an input, if that shows without reading it."""

    def read(self, index: int) -> BatchInput:
        """Read an input. An unreadable input has an `error`; nothing is raised."""


def open_source(
    text: str, *, column: str | None = None, without: Collection[Path] = ()
) -> BatchSource:
    """Find the inputs that an argument of the command line names.

    Args:
        text: A folder, a glob, a list of files (.txt, .lst), a tar, or a .csv, .jsonl or .parquet
            file.
        column: The column of a table, or the field of each line of JSON.
        without: Files to ignore, such as an output among them.

    Raises:
        SourceUnusableError: There are no inputs, or they cannot be read so.
    """
    path = Path(text)
    is_table = path.suffix.lower() in TABLE_SUFFIXES
    if column is not None and not is_table:
        raise SourceUnusableError(f"--column: {text} is no table: .csv, .jsonl or .parquet")
    left_out = frozenset(map(os.path.abspath, without))
    try:
        if os.path.abspath(path) in left_out:
            raise SourceUnusableError(f"--output: {text} is the input, and would be overwritten")
        if path.is_dir():
            source: BatchSource = _folder(path, left_out)
        elif not path.exists():
            source = _glob(text, left_out)
        elif is_table:
            source = open_table(path, column)
        else:
            source = _file(text, path)
        is_empty = not len(source)
    except (OSError, UnicodeDecodeError, csv.Error, tarfile.TarError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise SourceUnusableError(f"{text}: cannot be read: {reason}") from error
    if is_empty:
        raise SourceUnusableError(f"{text}: there are no inputs in it")
    return source


def digest_of(source: BatchSource) -> str:
    """Return a text that changes with a source's inputs, as far as that shows without reading."""
    digest = hashlib.sha256(str(len(source)).encode())
    for stamp in source.stamps():
        digest.update(stamp.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


class FileSource:
    """Files, each an input; with labels if they lie in a folder for each label."""

    def __init__(
        self, paths: Sequence[str], root: str = "", labels: Sequence[str | None] = ()
    ) -> None:
        self._paths = paths
        self._root = root
        self._labels = labels

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._paths)

    def name(self, index: int) -> str:
        """Return the path of an input."""
        return self._paths[index]

    def stamps(self) -> Iterator[str]:
        """Yield each path and its stamp."""
        for path in self._paths:
            yield f"{path} {stamp_of(os.path.join(self._root, path))}"

    def read(self, index: int) -> BatchInput:
        """Read a file."""
        name = self._paths[index]
        label = self._labels[index] if self._labels else None
        return input_at(index, name, os.path.join(self._root, name), label)


def _folder(root: Path, left_out: Collection[str]) -> FileSource:
    """Find the files in a folder; its subfolders are labels if no picture lies beside them.

    An unreadable folder is listed among the files, so that the run reports it.
    """
    names: list[str] = []
    unread: list[OSError] = []
    for folder, subfolders, files in os.walk(root, onerror=unread.append, followlinks=True):
        subfolders[:] = [
            each for each in subfolders if not (each.startswith(".") or _leads_up(folder, each))
        ]
        inside = os.path.relpath(folder, root)
        for name in files:
            is_left_out = os.path.abspath(os.path.join(folder, name)) in left_out
            if not name.startswith(".") and not is_left_out:
                names.append(os.path.normpath(os.path.join(inside, name)))
    for error in unread:
        if error.filename in (str(root), None):
            raise error
        names.append(os.path.relpath(error.filename, root))
    names.sort()
    labels = [each.split(os.sep, 1)[0] if os.sep in each else None for each in names]
    beside = [name for name, label in zip(names, labels, strict=True) if label is None]
    is_labelled = any(labels) and not any(kind_by_name(each) == "image" for each in beside)
    return FileSource(names, str(root), labels if is_labelled else ())


def _leads_up(folder: str, name: str) -> bool:
    """Return whether a subfolder is a link to the folder or to one above it."""
    path = os.path.join(folder, name)
    if not os.path.islink(path):
        return False
    above = os.path.realpath(folder)
    target = os.path.realpath(path)
    return os.path.commonpath((above, target)) == target


def _glob(text: str, left_out: Collection[str]) -> FileSource:
    if not glob.has_magic(text):
        raise SourceUnusableError(f"{text}: there is no such file or folder")
    found = sorted(each for each in glob.glob(text, recursive=True) if os.path.isfile(each))
    return FileSource([each for each in found if os.path.abspath(each) not in left_out])


def _file(text: str, path: Path) -> BatchSource:
    name = path.name.lower()
    if name.endswith(_LISTS):
        return _list(path)
    if name.endswith(_COMPRESSED_TARS):
        raise SourceUnusableError(f"{text}: a compressed tar has no random access: unpack it first")
    if name.endswith(".tar"):
        return TarSource(path)
    return FileSource([text])


def _list(path: Path) -> FileSource:
    """Read a list of files: on each line a path from the list's folder, maybe a tab and a label."""
    names: list[str] = []
    labels: list[str | None] = []
    for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        text = os.fsdecode(line.strip())
        if text and not text.startswith("#"):
            name, _, label = text.partition("\t")
            names.append(name.strip())
            labels.append(label.strip() or None)
    return FileSource(names, str(path.parent), labels if any(labels) else ())


_NO_PLACE = (0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TarMember:
    name: str
    place: tuple[int, int]
    label: tuple[int, int] | None
    label_is_json: bool


class TarSource:
    """A tar in the form of webdataset: the files with one stem are one input and its label."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._members: list[_TarMember] = []
        places: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        with tarfile.open(path, "r:") as archive:
            for member in _members_of(archive):
                if member.isreg() and not member.issparse():
                    places[member.name] = member.offset_data, member.size
                else:
                    places[member.name] = _NO_PLACE
                    links[member.name] = _target_of(member)
            self._flaw = _flaw_of(path, archive.offset)
        samples: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {}
        for name, place in places.items():
            folder, _, base = name.rpartition("/")
            stem, _, end = base.partition(".")
            if stem:  # else it is hidden
                found = places.get(links.get(name, ""), place)
                samples.setdefault(f"{folder}/{stem}", {})[end.lower()] = name, found
        for sample in samples.values():
            self._members += _inputs_of(sample)

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self._members) + bool(self._flaw)

    def name(self, index: int) -> str:
        """Return the member's name."""
        return self._members[index].name if index < len(self._members) else self._path

    def stamps(self) -> Iterator[str]:
        """Yield the stamp of the tar."""
        yield stamp_of(self._path)

    def read(self, index: int) -> BatchInput:
        """Read the member of an input."""
        if index == len(self._members):
            return failed_input(index, self._path, self._flaw)
        member = self._members[index]
        if member.place == _NO_PLACE:
            return failed_input(index, member.name, "is sparse, or a link to what is not here")
        try:
            with open(self._path, "rb") as file:
                data = piece_of(file.fileno(), member.place)
                label = None if member.label is None else piece_of(file.fileno(), member.label)
        except OSError as error:
            return unreadable_input(index, member.name, error)
        told = None if label is None else _told(label, is_json=member.label_is_json)
        return input_of(index, member.name, data, told)


def _members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a tar, up to an early end."""
    try:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # else all would stay in memory
            if member.isreg() or member.islnk() or member.issym():
                yield member
    except tarfile.ReadError:
        if archive.offset == 0:  # it is no tar
            raise


def _target_of(member: tarfile.TarInfo) -> str:
    """Return the name of a link's target; empty if the member is no link."""
    if member.issym():
        return posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
    return member.linkname if member.islnk() else ""


def _flaw_of(path: Path, end: int) -> str:
    """Return what is wrong with the end of a tar; empty if nothing is."""
    with open(path, "rb") as file:
        rest = os.pread(file.fileno(), _END_BYTES, end)
    if len(rest) < tarfile.BLOCKSIZE:
        return "the archive is cut short: what follows is not here"
    if any(rest):
        return f"the archive is damaged, or another follows it, at byte {end}: the rest is not read"
    return ""


def _inputs_of(sample: dict[str, tuple[str, tuple[int, int]]]) -> Iterator[_TarMember]:
    """Yield the inputs among the files with one stem: the pictures, or else all but the label."""
    label_end = next((each for each in _LABELS if each in sample), None)
    pictures = [each for each in sample if kind_by_name(f"x.{each}") == "image"]
    pictures = [each for each in pictures if "." not in each] or pictures
    others = [each for each in sample if each != label_end]
    if not others:  # a lone JSON file is an input
        others, label_end = list(sample), None
    for end in pictures or others:
        name, place = sample[end]
        label = None if label_end is None else sample[label_end][1]
        yield _TarMember(name=name, place=place, label=label, label_is_json=label_end == "json")


def _told(label: bytes, *, is_json: bool) -> str | None:
    """Return the label in a file: a text, or the label in an object of JSON."""
    if not is_json:
        return label.decode("utf-8", "replace").strip() or None
    try:
        value = json.loads(label)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = next((value[each] for each in _LABEL_KEYS if each in value), None)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
