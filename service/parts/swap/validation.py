"""Counts how many labelled inputs two versions label right.

They are the images that a training run has held out, a folder with one subfolder for each label, a
CSV file with the columns path and label, or a file with a JSON object in each line:
{"instance": ..., "label": ...}.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inferpool.models.bodies import body_of
from inferpool.models.errors import DataError
from inferpool.models.files.image_table import IMAGE_SUFFIXES, rows_of
from inferpool.models.files.reading import read_file
from inferpool.models.files.run_folder import RunFolder, has_begun, is_run, why_no_run
from inferpool.service.api.codecs.body import BodyContext, Limits
from inferpool.service.api.codecs.requests import decode
from inferpool.service.errors import InvalidInputError, OverloadedError, ServiceError
from inferpool.service.parts.swap.comparison import NO_ROOM, Comparison, asked, label_of
from inferpool.service.parts.swap.inputs import SwapInput

if TYPE_CHECKING:
    from inferpool.service.api.routes.health import SwapFigures
    from inferpool.service.queue.instance import Result
    from inferpool.service.queue.pool import Pool

_MOST_CASES = 1_000_000
_MOST_BYTES = 256 * 2**20
"""The largest file of JSON lines."""
_KINDS = ("label", "index")
"""Keys of an answer that say what it is, by name and by number.

The name of one class may be the number of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledInput:
    """One input of a validation."""

    where: str
    """Its file, and its line in it."""
    label: str
    path: Path | None = None
    """An image file; None if the instance is given."""
    instance: msgspec.Raw | None = None


class _Line(msgspec.Struct):
    instance: msgspec.Raw
    label: str | int


def read_cases(validation: str) -> list[LabelledInput]:
    """Find the labelled inputs of a folder or a file. Images are read later. Blocks.

    Raises:
        InvalidInputError: There are none, or they cannot be read; names the path.
    """
    path = Path(validation)
    try:
        if is_run(path):
            found = _of_run(RunFolder(path))
        elif has_begun(path):
            raise InvalidInputError(f"validation: {why_no_run(path)}")
        elif path.is_dir():
            found = _of_folder(path)
        elif path.is_file():
            found = _of_table(path) if path.suffix.lower() == ".csv" else _of_file(path)
        else:
            raise InvalidInputError(f"validation: there is no file or folder {validation!r}")
        cases = [*islice(found, _MOST_CASES + 1)]
    except DataError as error:
        raise InvalidInputError(f"validation: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"validation: {validation!r} cannot be read: {reason}") from error
    if not cases:
        raise InvalidInputError(
            f"validation: {validation!r} has no labelled inputs; give the folder of a training "
            "run, a folder with one subfolder of images for each label, a .csv file with the "
            'columns path and label, or a file with lines like {"instance": ..., "label": ...}'
        )
    if len(cases) > _MOST_CASES:
        raise InvalidInputError(f"validation: {validation!r} has over {_MOST_CASES} inputs")
    return cases


async def validate(
    comparison: Comparison,
    new: "Pool",
    cases: Sequence[LabelledInput],
    figures: "SwapFigures",
    on_progress: Callable[[int], None],
) -> "SwapFigures":
    """Return figures with the shares of inputs that both versions label right.

    An input that a version fails on counts as wrong. Inputs without room count for neither. The
    labels are read as names or as numbers: the way that makes more of them right.

    Raises:
        InvalidInputError: An input cannot be read any more, or neither version can read it; names
            it.
    """
    num = 0
    right: Counter[tuple[str, bool]] = Counter()
    for number, case in enumerate(cases, 1):
        sample = await asyncio.to_thread(sample_of, case, new)
        before, after = await asyncio.gather(comparison.before(sample), asked(new, sample))
        if isinstance(before, InvalidInputError) and isinstance(after, InvalidInputError):
            raise InvalidInputError(f"validation: {case.where}: {before.message}")
        if not isinstance(before, NO_ROOM) and not isinstance(after, OverloadedError):
            num += 1
            for is_new, answer in enumerate((before, after)):
                kinds = _kinds_of_right(answer, case.label)
                right.update((kind, bool(is_new)) for kind in kinds)
        on_progress(number)
    if not num:
        raise OverloadedError("the validation found no room in the queue", retry_after_s=10)
    kind = max(_KINDS, key=lambda kind: right[kind, False] + right[kind, True])
    return replace(
        figures,
        num_validated=num,
        accuracy=round(right[kind, True] / num, 5),
        accuracy_before=round(right[kind, False] / num, 5),
    )


def _of_run(run: RunFolder) -> Iterator[LabelledInput]:
    """Yield the images that the run was judged on: those it held out and could read."""
    if not run.validation.is_file():
        raise InvalidInputError(
            f"validation: the run in {run.path} keeps no table of held-out images; give other "
            "labelled inputs"
        )
    unreadable = set()
    if run.skipped.is_file():
        unreadable = {path for _, (path, _) in rows_of(run.skipped, ("path", "reason"))}
    for _, (name, label) in rows_of(run.validation):
        path = Path(name)
        if not path.is_absolute():  # it is the number of an item
            raise InvalidInputError(
                f"validation: the run in {run.path} held out items of a dataset, not files; give "
                "other labelled inputs"
            )
        if name not in unreadable:
            yield LabelledInput(where=name, label=label, path=path)


def _of_table(table: Path) -> Iterator[LabelledInput]:
    for _, (name, label) in rows_of(table):
        path = table.absolute().parent / name.lstrip()
        yield LabelledInput(where=str(path), label=label.strip(), path=path)


def _of_folder(folder: Path) -> Iterator[LabelledInput]:
    for label in sorted(each for each in folder.iterdir() if each.is_dir()):
        for path in sorted(label.iterdir()):
            if path.suffix.lower() not in IMAGE_SUFFIXES or path.name.startswith("."):
                continue
            yield LabelledInput(where=str(path), label=label.name, path=path)


def _of_file(path: Path) -> Iterator[LabelledInput]:
    if path.stat().st_size > _MOST_BYTES:
        raise InvalidInputError(f"validation: {str(path)!r} is larger than {_MOST_BYTES} bytes")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            read = msgspec.json.decode(line, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"validation: {where}: {error}") from error
        yield LabelledInput(where=where, label=str(read.label), instance=read.instance)


def sample_of(case: LabelledInput, pool: "Pool") -> SwapInput:
    """Read an input as a call would bring it. Blocks."""
    head = BodyContext({}, b"", pool.inputs, Limits(), pool.interface)
    try:
        if case.path is not None:
            is_image = case.path.suffix.lower() in IMAGE_SUFFIXES
            content_type = b"image/*" if is_image else b"application/octet-stream"
            body = read_file(case.path)
        else:
            assert case.instance is not None, "an input has a path or an instance"
            content_type = b"application/json"
            body = msgspec.json.encode(body_of(pool.interface, case.instance))
        decoded = decode(content_type, [body], head)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"validation: {case.where} cannot be read: {reason}") from error
    except ServiceError as error:
        raise InvalidInputError(f"validation: {case.where}: {error.message}") from error
    if len(decoded.payloads) != 1:
        raise InvalidInputError(f"validation: {case.where} is not one input")
    return SwapInput.of(decoded.payloads[0], decoded.parameters)


def _kinds_of_right(answer: "Result | ServiceError", label: str) -> list[str]:
    """Return how a label matches the best answer: by its name, by its number, or both."""
    if isinstance(answer, ServiceError):
        return []
    value = answer.value
    found = _labels_in(msgspec.json.decode(value) if isinstance(value, bytes) else value)
    return [kind for kind, each in found.items() if str(each) == label]


def _labels_in(answer: object) -> Mapping[str, object]:
    """Return the name and the number of the best answer, as far as it has them."""
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        answer = answer[0]
    if isinstance(answer, dict):
        if found := {kind: answer[kind] for kind in _KINDS if kind in answer}:
            return found
        return _labels_in(*answer.values()) if len(answer) == 1 else {}
    label = label_of(answer)
    return {} if label is None else dict.fromkeys(_KINDS, label)
