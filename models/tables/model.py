"""Serves estimators of scikit-learn: rows of a table, or texts. Runs in worker processes only."""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.files.opened import announce
from inferpool.models.inputs import features_of
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.tables.estimator import (
    Columns,
    chosen_method,
    classes_of,
    columns_of,
    read_estimator,
    scores_pairs,
    share_threads,
    steps_of,
)

logger = logging.getLogger(__name__)

_ROW = "row"
"""Name of the feature that has a row with texts in it, or a text, as JSON in uint8."""
_MOST_SHOWN = 12
"""Most columns that the log names."""


class TableModel(Model):
    """Serves a `.skops` file with an estimator or a pipeline of scikit-learn.

    An instance is an object with a value for each column by name, if the estimator knows names; or
    a list of values; or a text, where the first step reads texts. Classifiers answer with the label
    and the probability of each class.

    Args:
        path: The file.
        method: "predict_proba", "decision_function", "predict" or "transform"; by default the first
            of these that the estimator has.
        trusted: Types in the file that skops does not know, and that you trust.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
    """

    preprocessed = ()
    _makes_samples = True

    def __init__(
        self,
        path: Path,
        *,
        method: str | None = None,
        trusted: Sequence[str] = (),
        finite_outputs: bool = True,
    ) -> None:
        if isinstance(trusted, str) or not all(isinstance(each, str) for each in trusted):
            raise ModelError(f"option 'trusted' must be a list of types, not {trusted!r}")
        self._path = path
        self._wanted = method
        self._trusted = trusted
        self.finite_outputs = finite_outputs

    def load(self, placement: Placement) -> None:
        """Read the estimator, and try it on a row.

        Raises:
            ModelError: The file cannot be read, or has types that are not trusted.
        """
        announce(self._path)
        estimator = read_estimator(self._path, self._trusted)
        share_threads(estimator, placement.num_threads)
        self._method = chosen_method(self._path, estimator, self._wanted)
        self._classes = classes_of(estimator) if self._method != "transform" else []
        self.labels = [str(each) for each in self._classes]
        self._columns = columns = columns_of(estimator)
        self._before, self._last = steps_of(estimator)
        self._are_pairs = self._method == "decision_function" and scores_pairs(self._last)
        self._has_pandas = bool(columns.names) and find_spec("pandas") is not None
        if not columns.is_text:
            num = columns.num or -1
            self.inputs = [TensorSpec(name="x", dtype="float64", shape=(-1, num))]
        self._try(columns)
        kind = " > ".join(type(each).__name__ for _, each in getattr(estimator, "steps", ()))
        logger.info(
            "%s: %s; %s%s; takes %s; in this process, with %d threads",
            self._path,
            kind or type(estimator).__name__,
            self._method,
            f" of the classes {_listed(self._classes)}" if self._classes else "",
            _described(columns),
            placement.num_threads,
        )

    def preprocess(self, item: Item) -> Features:
        """Read a row of numbers to float64 [columns]; another row, or a text, to JSON in uint8."""
        columns = self._columns
        if item.kind == "tensors" and self.inputs:
            return features_of(item, self.inputs)
        if item.kind == "bytes" and columns.is_text:
            value: object = item.payload.tobytes().decode("utf-8", "replace")
        else:
            value = item.plain_json()
        if columns.is_text:
            text = value.get("text") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise InputError('instance: expected a text, or an object {"text": "..."}')
            return {_ROW: _encoded(text)}
        row = _row_of(value, columns)
        if all(type(each) in (int, float) for each in row):
            try:
                return {"x": torch.tensor(row, dtype=torch.float64)}
            except (OverflowError, RuntimeError):
                raise InputError("instance: a number is out of range for float64") from None
        return {_ROW: _encoded(row)}

    def bucket(self, features: Features) -> Hashable:
        """Compute rows of numbers apart from those with texts in them."""
        return next(iter(features))

    def collate(self, instances: Sequence[Features]) -> Features:
        """Stack numbers; fill up JSON with zeros."""
        if _ROW not in instances[0]:
            return super().collate(instances)
        return {_ROW: pad_sequence([each[_ROW] for each in instances], batch_first=True)}

    def forward(self, batch: Features) -> Features:
        """Call the method of the estimator once for the batch."""
        if _ROW in batch:
            texts = [row.numpy().tobytes().rstrip(b"\0") for row in batch[_ROW]]
            rows: Any = [msgspec.json.decode(text) for text in texts]
        else:
            rows = batch["x"].numpy()
        try:
            return self._computed(rows)
        except (ValueError, TypeError, OverflowError) as error:
            if self.example is None:
                raise
            # It computes the example, so this is about values, such as an unknown category.
            raise InputError(f"the estimator refuses the instance: {first_line(error)}") from error

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Render the label, with the scores of all classes where the method gives them."""
        if "label" not in outputs:
            return super().render(outputs, parameters)
        label = self._classes[int(outputs["label"])]
        rest = {
            name: dict(zip(map(str, self._classes), tensor.tolist(), strict=True))
            if tensor.dim() and len(tensor) == len(self._classes) and not self._are_pairs
            else tensor.tolist()
            for name, tensor in outputs.items()
            if name != "label"
        }
        return {"label": label, **rest} if rest else label

    def _computed(self, rows: Any) -> dict[str, Tensor]:
        x = rows if self._columns.is_text else self._table(rows)
        for step in self._before:
            x = step.transform(x)
        found = getattr(self._last, self._method)(x)
        if self._method == "predict" and self._classes:
            return {"label": self._indices(found)}
        if isinstance(found, list):  # of several targets
            raise ModelError(
                f"{self._path}: {self._method} gives an array for each of several targets: set "
                'options = { method = "predict" }'
            )
        if hasattr(found, "toarray"):
            found = found.toarray()
        values = np.asarray(found)
        if values.dtype.kind not in "fiub":
            raise ModelError(
                f"{self._path}: {self._method} gives no numbers, and no classes that the "
                "estimator knows"
            )
        names = {"predict_proba": "probabilities", "decision_function": "scores"}
        output = {names.get(self._method, "output"): torch.from_numpy(np.ascontiguousarray(values))}
        if not self._classes:
            return output
        return {"label": self._indices(self._last.predict(x)), **output}

    def _table(self, rows: Any) -> Any:
        """Return rows as the estimator was fitted on them; missing values are NaN."""
        if not isinstance(rows, np.ndarray):
            rows = [[math.nan if each is None else each for each in row] for row in rows]
        if self._has_pandas:
            import pandas

            return pandas.DataFrame(rows, columns=list(self._columns.names))
        if isinstance(rows, np.ndarray):
            return rows
        has_texts = any(isinstance(each, str) for row in rows for each in row)
        return np.array(rows, dtype=object if has_texts else np.float64)

    def _indices(self, labels: Any) -> Tensor:
        places = {label: index for index, label in enumerate(self._classes)}
        return torch.tensor([places[each] for each in np.asarray(labels).tolist()])

    def _try(self, columns: Columns) -> None:
        """Compute a row of what the estimator knows, to find its outputs and an example.

        Raises:
            ModelError: It computes nothing that can be served.
        """
        if columns.is_text:
            example: object = "a short text"
        elif columns.names:
            example = dict(zip(columns.names, columns.examples, strict=True))
        else:
            example = list(columns.examples)
        text = memoryview(msgspec.json.encode(example))
        try:
            if not columns.is_text and columns.num is None:
                return
            one = self.preprocess(Item(kind="json", payload=text))
            outputs = self.forward(self.collate([one, one]))
        except ModelError:
            raise
        except Exception as error:  # a step may refuse what is made up
            if lacks_resources(error):
                raise
            if columns.names and not self._has_pandas:
                raise ModelError(
                    f"{self._path} was fitted on a table with names, for which it needs pandas: "
                    f"pip install 'inferpool[sklearn]' ({first_line(error)})"
                ) from error
            logger.warning(
                "%s: no example is shown, since a made-up row fails: %s: %s",
                self._path,
                type(error).__name__,
                first_line(error),
            )
            return
        self.example = example
        self.outputs = [
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=(-1, *tensor.shape[1:]),
            )
            for name, tensor in outputs.items()
        ]


def _row_of(value: object, columns: Columns) -> list[Any]:
    """Return the values of a row in the order of the columns.

    Raises:
        InputError: They are other ones.
    """
    if isinstance(value, dict) and columns.names:
        missing = [name for name in columns.names if name not in value]
        if missing:
            raise InputError(f"instance: no value for {_listed(missing)}; null is a missing one")
        if unknown := [name for name in value if name not in columns.names]:
            raise InputError(
                f"instance: there is no column {_listed(unknown)}: they are "
                f"{_listed(columns.names)}"
            )
        row = [value[name] for name in columns.names]
    elif isinstance(value, list):
        row = value
        if columns.num is not None and len(row) != columns.num:
            raise InputError(f"instance: expected {columns.num} values, found {len(row)}")
    else:
        by_name = "an object with a value for each column, or " if columns.names else ""
        many = "values" if columns.num is None else f"{columns.num} values"
        raise InputError(f"instance: expected {by_name}a list of {many}")
    for place, each in enumerate(row):
        if isinstance(each, list | dict):
            name = columns.names[place] if columns.names else place
            raise InputError(f"instance[{name!r}]: expected a number, a text, true, false or null")
    return row


def _encoded(value: object) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)


def _described(columns: Columns) -> str:
    if columns.is_text:
        return "texts"
    if columns.names:
        return f"{len(columns.names)} columns: {_listed(columns.names)}"
    return "rows of numbers" if columns.num is None else f"rows of {columns.num} numbers"


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(map(str, names[:_MOST_SHOWN])) + more
