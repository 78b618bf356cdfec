"""Outputs of a run: files that a later run can continue after any end.

Each answer is one line, written at once. A SIGKILL may leave half a line at the end; `--resume`
cuts it off, and computes the missing answers. A Parquet file is written at once at the end, so its
answers are lines of JSON in a file beside it until the run is over. Another file beside it, also
until then, names the inputs and the model: answers for others are never mixed in.
"""

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, Self, TypeAlias

from inferpool.models.files.writing import lock, replacing, write_all
from inferpool.service.batch.inputs import BatchAnswer, RunLostError, SourceUnusableError
from inferpool.service.client.contents import ReceivedContent, content_in

OutputFormat: TypeAlias = Literal["jsonl", "csv", "parquet"]
COLUMNS = ("index", "input", "label", "prediction", "error_code", "error")
"""Columns of CSV and Parquet; `prediction` is JSON."""
_ROWS_PER_GROUP = 10_000
_LINES, _NOTE, _DRAFT = ".partial", ".resume", ".tmp"
"""Endings of the files beside an unfinished output."""
_SUFFIXES: dict[str, OutputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}


class AnswerFile(Protocol):
    """Stores the answers of a run."""

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        """Write answers, so that they outlive this process."""

    def finish(self) -> None:
        """Complete the output, and make it durable."""


def files_of(path: str) -> Sequence[Path]:
    """Return an output and the files that may lie beside it."""
    output = Path(path)
    return [output, *(_beside(output, each) for each in (_LINES, _NOTE, _DRAFT, _NOTE + _DRAFT))]


def format_of(path: str, chosen: str | None) -> OutputFormat:
    """Return the format of an output, by its name if none is chosen.

    Raises:
        SourceUnusableError: The name has no known ending.
    """
    if chosen in ("jsonl", "csv", "parquet"):
        return chosen  # type: ignore[return-value]  # mypy does not narrow it
    suffix = Path(path).suffix.lower()
    if path == "-":
        return "jsonl"
    if suffix not in _SUFFIXES:
        raise SourceUnusableError(
            f"--output: {path} does not say its format: end it in .jsonl, .csv or .parquet, or "
            "give --format"
        )
    return _SUFFIXES[suffix]


class LineStream:
    """Lines to stdout; no later run can continue them."""

    def __init__(self, format: OutputFormat, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stdout.buffer
        self._line = _csv_line if format == "csv" else _json_line
        if format == "parquet":
            raise SourceUnusableError("--format parquet needs a file: give --output")
        if format == "csv":
            self._stream.write(_row(COLUMNS))

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        """Write answers."""
        self._stream.write(b"".join([self._line(_with_base64(each)) for each in answers]))
        self._stream.flush()

    def finish(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class Journal:
    """An output file; one run at a time may write it."""

    def __init__(
        self,
        path: str,
        format: OutputFormat,
        *,
        about: Mapping[str, str],
        resumes: bool,
        overwrites: bool,
    ) -> None:
        """Open the file.

        Args:
            path: The output.
            format: Its format.
            about: The inputs ("inputs"), and flags with their values: all that determines the
                answers. It must not change when a run is resumed.
            resumes: Continue the existing answers.
            overwrites: Delete them.

        Raises:
            SourceUnusableError: There is a file and no flag says what to do with it, another run
                writes it, it is from another run, or it cannot be written.
        """
        self._path = Path(path)
        self._format = format
        self._own = self._path
        """The file with the lines."""
        self._note = _beside(self._path, _NOTE)
        """The file that names the inputs and the model."""
        if os.path.exists(path) and not os.path.isfile(path):  # neither raises
            raise SourceUnusableError(f"--output: {path} is no file")
        if format == "parquet":
            _require_pyarrow()
            self._own = _beside(self._path, _LINES)
        there = self._present(may_exist=resumes or overwrites)
        self._is_whole = format == "parquet" and resumes and there == [self._path]
        """True if the Parquet file is complete: nothing is left to do."""
        self.is_over = self._is_whole
        """True if the run that wrote the answers has ended: nothing can be added."""
        try:
            self._file = open(self._own, "a+b", buffering=0)  # noqa: SIM115 - for the whole run
            lock(self._file)
            if overwrites:
                self._file.truncate(0)
                if self._own != self._path:  # else a later --resume would see a finished run
                    self._path.unlink(missing_ok=True)
            if not self._is_whole:
                self._compare(about)
        except BlockingIOError as error:
            self._file.close()
            raise SourceUnusableError(f"{self._own}: another run is writing it") from error
        except OSError as error:
            raise SourceUnusableError(f"{self._own}: {error.strerror}") from error
        self._line: Callable[[BatchAnswer], bytes]
        self._line = _csv_line if format == "csv" else _json_line

    def _present(self, *, may_exist: bool) -> Sequence[Path]:
        """Return the files with answers of an earlier run; raise if they may not exist."""
        there = [
            each for each in (self._path, self._own) if os.path.exists(each) and each.stat().st_size
        ]
        if there and not may_exist:
            raise SourceUnusableError(
                f"{there[0]} exists: --resume goes on with it, --overwrite begins anew"
            )
        return there

    def __enter__(self) -> Self:
        """Return this file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if not os.fstat(self._file.fileno()).st_size:
            self._note.unlink(missing_ok=True)
            self._own.unlink(missing_ok=True)
        elif self._is_whole and self._own != self._path:
            self._own.unlink(missing_ok=True)
        self._file.close()

    def earlier(self) -> Iterator[BatchAnswer]:
        """Yield the existing answers, and cut off the file after the last complete one.

        Raises:
            SourceUnusableError: The file is not the output of such a run.
        """
        if self._is_whole:
            yield from _read_parquet(self._path)
            return
        end = 0
        with open(self._own, "rb") as file:
            for number, row in enumerate(_rows(file, is_csv=self._format == "csv")):
                if b"\0" in row and not self.is_over:
                    break  # a crash of the system may leave zeros at the end
                is_header = self._format == "csv" and number == 0
                try:
                    if is_header:
                        if row != _row(COLUMNS):
                            raise ValueError("other columns")
                    else:
                        yield _parsed_csv(row) if self._format == "csv" else _parsed(row)
                except (ValueError, KeyError, TypeError, IndexError, csv.Error) as error:
                    raise SourceUnusableError(
                        f"{self._own}: line {number + 1} is not of such a run ({error}): name "
                        "another --output, or --overwrite it"
                    ) from error
                end += len(row)
        if not self.is_over:
            self._file.truncate(end)

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        """Write answers.

        Raises:
            RunLostError: The disk is full, say.
        """
        with self._lost():
            lines = b"".join([self._line(self._with_file(each)) for each in answers])
            if self._format == "csv" and not os.fstat(self._file.fileno()).st_size:
                lines = _row(COLUMNS) + lines
            write_all(self._file.fileno(), lines)

    def finish(self) -> None:
        """Complete the output, and make it durable.

        Raises:
            RunLostError: The disk is full, say.
        """
        with self._lost():
            if not self._is_whole:
                os.fsync(self._file.fileno())
                if self._format == "parquet":
                    self._convert()
                self._is_whole = True
            self._note.unlink(missing_ok=True)

    def _with_file(self, answer: BatchAnswer) -> BatchAnswer:
        """Write a content to a file of its own; the answer then says where that is."""
        content = content_in(answer.prediction)
        if content is None:
            return answer
        shown = content.file_beside(self._path, answer.index)
        return replace(answer, prediction=shown)

    def _compare(self, about: Mapping[str, str]) -> None:
        """Store what determines the answers, or compare it with that of existing answers.

        Raises:
            SourceUnusableError: They differ.
        """
        if not os.fstat(self._file.fileno()).st_size:
            with replacing(self._note, _DRAFT) as draft:
                draft.write_bytes(json.dumps(about).encode())
            return
        try:
            before = json.loads(self._note.read_bytes())
        except FileNotFoundError:
            self.is_over = True
            return
        except ValueError:
            before = None
        if not isinstance(before, dict):
            before = {}
        for name, value in about.items():
            if before.get(name) != value:
                self._file.close()
                found = f"{name} {before.get(name)}"
                if name == "inputs":
                    found = "other inputs: names, sizes, times or the column have changed"
                raise SourceUnusableError(
                    f"--resume: {self._path} was begun with {found}; go back to that, name another "
                    "--output, or --overwrite it"
                )

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunLostError(f"{self._path}: cannot be written: {reason}") from error

    def _convert(self) -> None:
        """Write the Parquet file under another name, and rename it when it is complete."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(
            [(each, pa.int64() if each == "index" else pa.string()) for each in COLUMNS]
        )
        rows: list[dict[str, object]] = []

        with (
            replacing(self._path, _DRAFT) as draft,
            open(self._own, "rb") as lines,
            pq.ParquetWriter(draft, schema) as writer,
        ):
            for line in lines:
                rows.append(dict(zip(COLUMNS, _cells(_parsed(line)), strict=True)))
                if len(rows) == _ROWS_PER_GROUP:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _with_base64(answer: BatchAnswer) -> BatchAnswer:
    """Return an answer that JSON can hold: a content as it stands in JSON."""
    if isinstance(answer.prediction, ReceivedContent):
        return replace(answer, prediction=answer.prediction.document)
    return answer


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401 - an extra of the package
    except ModuleNotFoundError as error:
        raise SourceUnusableError(
            "--format parquet needs pyarrow: pip install 'inferpool[parquet]'"
        ) from error


def _json_line(answer: BatchAnswer) -> bytes:
    document: dict[str, object] = {"index": answer.index, "input": in_utf8(answer.name)}
    if answer.label is not None:
        document["label"] = in_utf8(answer.label)
    if answer.code:
        document["error"] = {"code": answer.code, "message": in_utf8(answer.message)}
    else:
        document["prediction"] = answer.prediction
    return _dumped(document).encode() + b"\n"


def _dumped(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which Python allows
        return json.dumps(value)
    return text


def _parsed(line: bytes) -> BatchAnswer:
    document = json.loads(line)
    error = document.get("error") or {"code": "", "message": ""}
    return BatchAnswer(
        index=int(document["index"]),
        name=document["input"],
        label=document.get("label"),
        prediction=document.get("prediction"),
        code=error["code"],
        message=error["message"],
    )


def _cells(answer: BatchAnswer) -> Sequence[object]:
    prediction = None if answer.code else _dumped(answer.prediction)
    label = None if answer.label is None else in_utf8(answer.label)
    error = in_utf8(answer.message) if answer.code else None
    return answer.index, in_utf8(answer.name), label, prediction, answer.code or None, error


def in_utf8(name: str) -> str:
    """Return a file's name in UTF-8, for all outputs; its bytes may be anything else."""
    return name.encode("utf-8", "backslashreplace").decode()


def _csv_line(answer: BatchAnswer) -> bytes:
    return _row(["" if each is None else each for each in _cells(answer)])


def _row(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue().encode()


def _parsed_csv(row: bytes) -> BatchAnswer:
    index, name, label, prediction, code, message = next(
        csv.reader(io.StringIO(row.decode("utf-8"), newline=""))
    )
    return BatchAnswer(
        index=int(index),
        name=name,
        label=label or None,
        prediction=json.loads(prediction) if prediction else None,
        code=code,
        message=message,
    )


def _read_parquet(path: Path) -> Iterator[BatchAnswer]:
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches(columns=list(COLUMNS)):
            for row in batch.to_pylist():
                yield BatchAnswer(
                    index=row["index"],
                    name=row["input"],
                    label=row["label"],
                    prediction=json.loads(row["prediction"] or "null"),
                    code=row["error_code"] or "",
                    message=row["error"] or "",
                )
    except (OSError, ValueError, KeyError) as error:
        raise SourceUnusableError(f"{path}: is not of such a run: {error}") from error


def _rows(file: BinaryIO, *, is_csv: bool) -> Iterator[bytes]:
    """Yield whole rows with their ends. A quoted cell of CSV may contain line ends."""
    row = b""
    for line in file:
        row += line
        if not line.endswith(b"\n"):
            return
        if is_csv and row.count(b'"') % 2:
            continue
        yield row
        row = b""
