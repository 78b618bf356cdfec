"""Tables as sources of a run: CSV, lines of JSON, and Parquet. A column has the inputs."""

import csv
import io
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors, json_message
from inferpool.service.batch.inputs import (
    MAX_FILE_BYTES,
    BatchInput,
    SourceUnusableError,
    failed_input,
    input_of_cell,
    piece_of,
    stamp_of,
    unreadable_input,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_SPACE = b" \t\r\n"
"""White space of JSON: lines with nothing else do not count, as in the bodies of jobs."""
_ROWS = 64
"""Rows of Parquet in memory at the same time. They may hold pictures."""
_BUFFER_BYTES = 1 << 20


def open_table(path: Path, column: str | None) -> "LineSource | ParquetSource":
    """Find the rows of a table; its name ends in one of `TABLE_SUFFIXES`.

    Raises:
        SourceUnusableError: The column is missing, or the file is no such table.
        OSError: It cannot be read.
    """
    match path.suffix.lower():
        case ".parquet":
            return ParquetSource(path, column)
        case ".csv" | ".tsv":
            return CsvSource(path, column)
    return JsonlSource(path, column)


class LineSource:
    """A text file with an input on each line or row, found by its offset."""

    def __init__(self, path: Path, column: str | None) -> None:
        self._path = str(path)
        self._folder = str(path.parent)
        self._column = column
        self._starts = array("Q")
        """Offsets of the rows, and at last the end of the last row."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return max(0, len(self._starts) - 1)

    def name(self, _: int) -> str:
        """Return no name: a cell may name a file."""
        return ""

    def stamps(self) -> Iterator[str]:
        """Yield the stamp of the file."""
        yield f"{self._column} {stamp_of(self._path)}"

    def read(self, index: int) -> BatchInput:
        """Read a line."""
        name = _row_name(self._path, index)
        start, end = self._starts[index], self._starts[index + 1]
        try:
            with open(self._path, "rb") as file:
                value = self._value(piece_of(file.fileno(), (start, end - start)))
        except OSError as error:
            return unreadable_input(index, name, error)
        except UnicodeDecodeError as error:
            return failed_input(index, name, f"is not in UTF-8: {error}")
        except (ValueError, csv.Error, RecursionError) as error:
            return failed_input(index, name, str(error))
        return input_of_cell(index, name, value, self._folder)

    def _value(self, row: bytes) -> object:
        raise NotImplementedError


class JsonlSource(LineSource):
    """Lines of JSON; the instance is the field `column`, or the whole line."""

    def __init__(self, path: Path, column: str | None) -> None:
        super().__init__(path, column)
        position = end = 0
        with open(path, "rb") as file:
            for line in file:
                if (line if position else line.removeprefix(BYTE_ORDER_MARK)).strip(_SPACE):
                    self._starts.append(position)
                    end = position + len(line)
                position += len(line)
        if self._starts:
            self._starts.append(end)

    def _value(self, row: bytes) -> object:
        try:
            value = json.loads(row)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise ValueError(_why_no_json(row.strip(_SPACE)) or str(error)) from None
        if self._column is None:
            return value
        if not isinstance(value, dict) or self._column not in value:
            raise ValueError(f"it has no field {self._column!r}")
        return value[self._column]


def _why_no_json(line: bytes) -> str:
    """Return why a line is no JSON, in the words of a service; empty if a service accepts it.

    `json` reads the lines because it accepts NaN in unused fields, as Python writes it.
    """
    try:
        msgspec.json.decode(line)
    except JsonErrors as error:
        return json_message(error, line)
    return ""


class CsvSource(LineSource):
    """Rows of a CSV or TSV file. The first row names the columns. Cells are texts."""

    def __init__(self, path: Path, column: str | None) -> None:
        super().__init__(path, column)
        self._comma = "\t" if path.suffix.lower() == ".tsv" else ","
        position = 0

        def lines() -> Iterator[str]:
            nonlocal position
            with open(path, "rb") as file:
                for line in file:
                    position += len(line)
                    encoding = "utf-8-sig" if position == len(line) else "utf-8"
                    yield line.decode(encoding, "surrogateescape")  # an error in its own row

        csv.field_size_limit(MAX_FILE_BYTES)
        rows = csv.reader(lines(), delimiter=self._comma)
        header = next(rows, [])
        column = header[0] if column is None and len(header) == 1 else column
        if column not in header:
            raise SourceUnusableError(
                f"{path}: name one of its columns by --column: {', '.join(header)}"
            )
        self._column = column
        self._place = header.index(column)
        is_more = True
        while is_more:
            before = position
            try:
                row = next(rows, None)
            except csv.Error:  # `read` reports it for its row
                row = [""]
            is_more = row is not None
            if row:
                self._starts.append(before)
        if self._starts:
            self._starts.append(position)

    def _value(self, row: bytes) -> object:
        csv.field_size_limit(MAX_FILE_BYTES)
        text = row.decode("utf-8")
        if text.count('"') % 2:
            try:
                next(self._cells(text, strict=True), [])
            except csv.Error as error:
                raise ValueError(f"is no CSV, maybe a quote is not closed: {error}") from None
        cells = next(self._cells(text), [])
        if self._place >= len(cells):
            raise ValueError(f"the row has {len(cells)} columns, too few")
        return cells[self._place]

    def _cells(self, text: str, *, strict: bool = False) -> Iterator[list[str]]:
        # Lines end where `lines` ends them: a cell may hold Unicode's other line ends.
        return csv.reader(io.StringIO(text, newline="\n"), delimiter=self._comma, strict=strict)


class ParquetSource:
    """A column of a Parquet file. Rows are read in order; going back rereads a group of rows."""

    def __init__(self, path: Path, column: str | None) -> None:
        self._path = str(path)
        file = self._open()
        names = file.schema_arrow.names
        column = names[0] if column is None and len(names) == 1 else column
        if column is None or column not in names:
            raise SourceUnusableError(
                f"{path}: name one of its columns by --column: {', '.join(names)}"
            )
        self._column = column
        groups = range(file.metadata.num_row_groups)
        self._sizes = [file.metadata.row_group(each).num_rows for each in groups]
        self._reader: _GroupReader | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without open files: each process that reads opens the file itself."""
        return {**vars(self), "_reader": None}

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(self._sizes)

    def name(self, _: int) -> str:
        """Return no name: a cell may name a file."""
        return ""

    def stamps(self) -> Iterator[str]:
        """Yield the stamp of the file."""
        yield f"{self._column} {stamp_of(self._path)}"

    def read(self, index: int) -> BatchInput:
        """Read a row."""
        name, row, group = _row_name(self._path, index), index, 0
        while row >= self._sizes[group]:
            row -= self._sizes[group]
            group += 1
        try:
            if self._reader is None or not self._reader.can_reach(group, row):
                self._reader = _GroupReader(self._open(), group, self._column)
            value = self._reader.value(row)
        except (OSError, ValueError) as error:
            self._reader = None
            return failed_input(index, name, f"cannot be read: {error}")
        return input_of_cell(index, name, value, os.path.dirname(self._path))

    def _open(self) -> "pq.ParquetFile":
        try:
            import pyarrow.parquet as pq  # the package's extra
        except ModuleNotFoundError as error:
            raise SourceUnusableError(
                f"{self._path}: Parquet needs pyarrow: pip install 'inferpool[parquet]'"
            ) from error
        try:
            return pq.ParquetFile(self._path, buffer_size=_BUFFER_BYTES)
        except ValueError as error:  # pyarrow's ArrowInvalid is one
            raise SourceUnusableError(f"{self._path}: is no Parquet file: {error}") from error


class _GroupReader:
    """Reads a column of one group of rows in order, a few rows at a time."""

    def __init__(self, file: "pq.ParquetFile", group: int, column: str) -> None:
        self._group = group
        self._batches = file.iter_batches(_ROWS, row_groups=[group], columns=[column])
        self._rows: pa.Array | None = None
        self._first = 0

    def can_reach(self, group: int, row: int) -> bool:
        """Return whether a row is here or comes later."""
        return group == self._group and row >= self._first

    def value(self, row: int) -> object:
        """Return a cell.

        Raises:
            OSError: The file is damaged.
            ValueError: The same.
        """
        while self._rows is None or row >= self._first + len(self._rows):
            if self._rows is not None:
                self._first += len(self._rows)
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError("the file has fewer rows than it says")
            self._rows = batch.column(0)
        value: object = self._rows[row - self._first].as_py()
        return value


def _row_name(path: str, index: int) -> str:
    return f"{os.path.basename(path)}:{index + 1}"
