"""Sources of the inputs of a run. Any process can read any input by its index.

A source keeps paths and offsets, and opens its files in each process that reads, so that it can be
sent to readers.
"""

import csv
import glob
import json
import os
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inferpool.service.batch.inputs import BatchInput, InputKind, SourceUnusableError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_IMAGES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".jp2", ".ico", ".tga", ".avif", ".qoi", ".dds", ".pcx"),
        *(".psd", ".sgi", ".im", ".msp", ".icns", ".fli", ".xbm", ".xpm"),
    )
)
_KINDS: Mapping[str, InputKind] = {".json": "json", ".txt": "json", ".npy": "npy"}
_LISTS = (".txt", ".lst", ".list")
_LABELS = ("cls", "label")
_MAX_FILE_BYTES = 1 << 30


class BatchSource(Protocol):
    """Inputs in a fixed order, with random access. It can be pickled."""

    def __len__(self) -> int:
        """Return how many inputs there are."""

    def name(self, index: int) -> str:
        """Return the name of an input, without reading it."""

    def read(self, index: int) -> BatchInput:
        """Read an input. One that cannot be read has an `error`; nothing is raised for it."""


def open_source(text: str, *, column: str | None = None) -> BatchSource:
    """Find the inputs that a word of the command line names.

    Args:
        text: A folder, a glob, a list of files (.txt, .lst), a tar, or a .csv, .jsonl or .parquet
            file.
        column: The column of a table, or the field of each line of JSON.

    Raises:
        SourceUnusableError: There is nothing, or it cannot be read so.
    """
    path = Path(text)
    suffix = path.suffix.lower()
    is_table = suffix in (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
    if column is not None and not is_table:
        raise SourceUnusableError(f"--column: {text} is no table: .csv, .jsonl or .parquet")
    try:
        source = _open(text, path, suffix, column)
    except (OSError, UnicodeDecodeError, csv.Error, tarfile.TarError) as error:
        raise SourceUnusableError(f"{text}: cannot be read: {error}") from error
    if not len(source):
        raise SourceUnusableError(f"{text}: there are no inputs in it")
    return source


def _open(text: str, path: Path, suffix: str, column: str | None) -> BatchSource:
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        if not glob.has_magic(text):
            raise SourceUnusableError(f"{text}: there is no such file or folder")
        found = sorted(each for each in glob.glob(text, recursive=True) if os.path.isfile(each))
        return FileSource(found)
    if suffix in _LISTS:
        return _list(path)
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")):
        raise SourceUnusableError(f"{text}: a compressed tar has no random access: unpack it first")
    if suffix == ".tar":
        return TarSource(path)
    if suffix in (".csv", ".tsv"):
        return CsvSource(path, column)
    if suffix in (".jsonl", ".ndjson"):
        return JsonlSource(path, column)
    if suffix == ".parquet":
        return ParquetSource(path, column)
    return FileSource([text])


class FileSource:
    """Files, each an input; with labels if they lie in a folder for each label."""

    def __init__(self, paths: Sequence[str], root: str = "", labels: Sequence[str] = ()) -> None:
        self._paths = paths
        self._root = root
        self._labels = labels

    def __len__(self) -> int:
        """See `BatchSource`."""
        return len(self._paths)

    def name(self, index: int) -> str:
        """See `BatchSource`."""
        return self._paths[index]

    def read(self, index: int) -> BatchInput:
        """See `BatchSource`."""
        name = self._paths[index]
        return _read_path(index, name, os.path.join(self._root, name), self._label(index))

    def _label(self, index: int) -> str | None:
        return self._labels[index] if self._labels else None


def _folder(root: Path) -> FileSource:
    """Find the files in a folder; its subfolders are labels if no file lies beside them."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(each for each in subfolders if not each.startswith("."))
        inside = os.path.relpath(folder, root)
        shown = [each for each in files if not each.startswith(".")]
        names += [os.path.normpath(os.path.join(inside, each)) for each in shown]
    names.sort()
    is_labelled = bool(names) and all(os.sep in each for each in names)
    labels = [each.split(os.sep, 1)[0] for each in names] if is_labelled else []
    return FileSource(names, str(root), labels)


def _list(path: Path) -> FileSource:
    """Read a list of files: a path a line, from the list's folder, maybe a tab and its label."""
    names, labels = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, label = line.partition("\t")
        names.append(name.strip())
        labels.append(label.strip())
    return FileSource(names, str(path.parent), labels if names and all(labels) else ())


class TarSource:
    """A tar in the form of webdataset: the files with one stem are one input and its label."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._names: list[str] = []
        self._places: list[tuple[int, int]] = []
        self._labels: list[tuple[int, int] | None] = []
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg():
                    folder, _, base = member.name.rpartition("/")
                    stem, _, end = base.partition(".")
                    samples.setdefault(f"{folder}/{stem}", {})[end.lower()] = member
        for members in samples.values():
            label = next((members[each] for each in _LABELS if each in members), None)
            data = {end: each for end, each in members.items() if end not in _LABELS}
            images = [end for end in data if f".{end}" in _IMAGES]
            for end in images[:1] or list(data)[:1]:
                self._names.append(data[end].name)
                self._places.append((data[end].offset_data, data[end].size))
                self._labels.append(None if label is None else (label.offset_data, label.size))

    def __len__(self) -> int:
        """See `BatchSource`."""
        return len(self._names)

    def name(self, index: int) -> str:
        """See `BatchSource`."""
        return self._names[index]

    def read(self, index: int) -> BatchInput:
        """See `BatchSource`."""
        name, place = self._names[index], self._labels[index]
        try:
            with open(self._path, "rb") as file:
                data = _piece(file.fileno(), self._places[index])
                label = None if place is None else _piece(file.fileno(), place)
        except OSError as error:
            return _unreadable(index, name, error)
        told = None if label is None else label.decode("utf-8", "replace").strip()
        return _input_of(index, name, data, told)


class LineSource:
    """A text file with an input on each line or row, found by its offset."""

    def __init__(self, path: Path, column: str | None) -> None:
        self._path = str(path)
        self._folder = str(path.parent)
        self._column = column
        self._starts = array("Q")
        """Offsets of the rows, and at last the end of the last row."""

    def __len__(self) -> int:
        """See `BatchSource`."""
        return max(0, len(self._starts) - 1)

    def name(self, index: int) -> str:
        """See `BatchSource`."""
        return f"{os.path.basename(self._path)}:{index + 1}"

    def read(self, index: int) -> BatchInput:
        """See `BatchSource`."""
        start, end = self._starts[index], self._starts[index + 1]
        try:
            with open(self._path, "rb") as file:
                value = self._value(_piece(file.fileno(), (start, end - start)))
        except OSError as error:
            return _unreadable(index, self.name(index), error)
        except (ValueError, csv.Error, RecursionError) as error:
            return _wrong(index, self.name(index), str(error))
        return _from_value(index, self.name(index), value, self._folder)

    def _value(self, row: bytes) -> object:
        raise NotImplementedError


class JsonlSource(LineSource):
    """Lines of JSON; `column` is the field that is the instance, or else the whole line is it."""

    def __init__(self, path: Path, column: str | None) -> None:
        super().__init__(path, column)
        position = 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip() or self._starts:  # an empty line amid others is wrong in its place
                    self._starts.append(position)
                position += len(line)
        if self._starts:
            self._starts.append(position)

    def _value(self, row: bytes) -> object:
        value = json.loads(row)
        if self._column is None:
            return value
        if not isinstance(value, dict) or self._column not in value:
            raise ValueError(f"it has no field {self._column!r}")
        return value[self._column]


class CsvSource(LineSource):
    """Rows of a CSV or TSV file, whose first row names the columns."""

    def __init__(self, path: Path, column: str | None) -> None:
        super().__init__(path, column)
        self._comma = "\t" if path.suffix.lower() == ".tsv" else ","
        position = 0

        def lines() -> Iterator[str]:
            nonlocal position
            with open(path, "rb") as file:
                for line in file:
                    position += len(line)
                    yield line.decode("utf-8-sig" if position == len(line) else "utf-8")

        rows = csv.reader(lines(), delimiter=self._comma)
        header = next(rows, [])
        column = header[0] if column is None and len(header) == 1 else column
        if column not in header:
            raise SourceUnusableError(
                f"{path}: name one of its columns by --column: {', '.join(header)}"
            )
        self._place = header.index(column)
        before = position
        for row in rows:
            if row:
                self._starts.append(before)
            before = position
        if self._starts:
            self._starts.append(position)

    def _value(self, row: bytes) -> object:
        text = row.decode("utf-8").splitlines(keepends=True)
        cells = next(csv.reader(text, delimiter=self._comma), [])
        if self._place >= len(cells):
            raise ValueError(f"the row has {len(cells)} columns, too few")
        return cells[self._place]


class ParquetSource:
    """A column of a Parquet file."""

    def __init__(self, path: Path, column: str | None) -> None:
        self._path = str(path)
        file = self._open()
        names = file.schema_arrow.names
        column = names[0] if column is None and len(names) == 1 else column
        if column not in names:
            raise SourceUnusableError(
                f"{path}: name one of its columns by --column: {', '.join(names)}"
            )
        self._column = column
        groups = range(file.metadata.num_row_groups)
        self._sizes = [file.metadata.row_group(each).num_rows for each in groups]
        self._kept: tuple[int, Sequence[object]] | None = None
        """The row group that was read last."""

    def __len__(self) -> int:
        """See `BatchSource`."""
        return sum(self._sizes)

    def name(self, index: int) -> str:
        """See `BatchSource`."""
        return f"{os.path.basename(self._path)}:{index + 1}"

    def read(self, index: int) -> BatchInput:
        """See `BatchSource`."""
        name, row = self.name(index), index
        group = 0
        while row >= self._sizes[group]:
            row -= self._sizes[group]
            group += 1
        try:
            if self._kept is None or self._kept[0] != group:
                table = self._open().read_row_group(group, columns=[self._column])
                self._kept = group, table.column(0)
            value = self._kept[1][row].as_py()  # type: ignore[attr-defined]  # a column of pyarrow
        except (OSError, ValueError) as error:
            return _wrong(index, name, str(error))
        return _from_value(index, name, value, os.path.dirname(self._path))

    def _open(self) -> "pq.ParquetFile":
        try:
            import pyarrow.parquet as pq  # an extra of the package
        except ModuleNotFoundError as error:
            raise SourceUnusableError(
                f"{self._path}: Parquet needs pyarrow: pip install 'inferpool[parquet]'"
            ) from error
        try:
            return pq.ParquetFile(self._path)
        except ValueError as error:  # pyarrow's ArrowInvalid is one
            raise SourceUnusableError(f"{self._path}: is no Parquet file: {error}") from error


def _from_value(index: int, name: str, value: object, folder: str) -> BatchInput:
    """Make an input of a cell: bytes, a picture as datasets have it, a picture's path, or JSON."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    if isinstance(value, bytes):
        return BatchInput(index=index, name=name, kind="image", data=value)
    if isinstance(value, str) and _kind_of(value) in ("image", "npy"):
        return _read_path(index, value, os.path.join(folder, value), None)
    try:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        return _wrong(index, name, f"it is no JSON value: {error}")
    return BatchInput(index=index, name=name, kind="json", data=data)


def _read_path(index: int, name: str, path: str, label: str | None) -> BatchInput:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
                return _wrong(index, name, "it is larger than 1 GiB", label)
            data = file.read()
    except (OSError, ValueError) as error:
        return _unreadable(index, name, error, label)
    return _input_of(index, name, data, label)


def _input_of(index: int, name: str, data: bytes, label: str | None) -> BatchInput:
    if name.lower().endswith(".txt"):
        data = json.dumps(data.decode("utf-8", "replace").strip(), ensure_ascii=False).encode()
    return BatchInput(index=index, name=name, kind=_kind_of(name), data=data, label=label)


def _kind_of(name: str) -> InputKind:
    suffix = os.path.splitext(name)[1].lower()
    return "image" if suffix in _IMAGES else _KINDS.get(suffix, "bytes")


def _piece(fd: int, place: tuple[int, int]) -> bytes:
    data = os.pread(fd, place[1], place[0])
    if len(data) != place[1]:
        raise OSError("the file has become shorter since the run began")
    return data


def _unreadable(
    index: int, name: str, error: OSError | ValueError, label: str | None = None
) -> BatchInput:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return _wrong(index, name, f"cannot be read: {text}", label)


def _wrong(index: int, name: str, error: str, label: str | None = None) -> BatchInput:
    return BatchInput(index=index, name=name, kind="bytes", error=error, label=label)
