"""A model that raises, returns and logs things that do not fit into a message."""

import asyncio
import logging
import sys
import warnings
from collections.abc import Mapping

import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item

logger = logging.getLogger(__name__)

LONG = 30_000_000
"""Characters, far more than may be sent or logged."""
ACTS = {
    "ok": ("ok", "ok"),
    "long text": ("model_error", "model_error"),
    "long bytes": ("model_error", "model_error"),
    "long key": ("model_error", "model_error"),
    "long cause": ("model_error", "model_error"),
    "long note": ("model_error", "model_error"),
    "no text": ("model_error", "model_error"),
    "long input error": ("invalid_input", "invalid_input"),
    "cancelled": ("model_error", "model_error"),
    "no memory": ("exhausted", "exhausted"),
    "no descriptors": ("exhausted", "exhausted"),
    "many outputs": ("ok", "model_error"),
    "name of a number": ("ok", "model_error"),
    "long name": ("ok", "model_error"),
    "surrogate name": ("ok", "model_error"),
    "huge output": ("model_error", "model_error"),
    "sparse output": ("ok", "model_error"),
    "quantized output": ("ok", "model_error"),
    "complex output": ("model_error", "ok"),
    "surrogate value": ("model_error", "ok"),
    "deep value": ("model_error", "ok"),
    "value that raises": ("model_error", "ok"),
    "long log": ("ok", "ok"),
    "log without text": ("ok", "ok"),
    "long warning": ("ok", "ok"),
    "long print": ("ok", "ok"),
}
"""Results by act: of an instance that asks for JSON, and of one that asks for tensors."""
NAMES = list(ACTS)


class WordlessError(Exception):
    """An error that cannot be made into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text today")


class NoList:
    """A value that cannot be made into a list or a text."""

    def tolist(self) -> object:
        raise WordlessError

    def __str__(self) -> str:
        raise WordlessError


class HostileModel(Model):
    """Takes the name of an act; answers it."""

    finite_outputs = False

    def preprocess(self, item: Item) -> Features:
        act = str(item.json())
        match act:
            case "long input error":
                raise InputError("x" * LONG)
            case "no memory":
                raise MemoryError
            case "no descriptors":
                raise OSError(24, "Too many open files")
        return {"act": torch.tensor(NAMES.index(act))}

    def forward(self, batch: Features) -> Features:
        outputs = {"act": batch["act"]}
        for act in batch["act"].tolist():
            self._act(NAMES[act], outputs, len(batch["act"]))
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        match NAMES[int(outputs["act"])]:
            case "huge output" | "complex output":
                return super().render(outputs, parameters)
            case "surrogate value":
                return "\ud800"
            case "deep value":
                value: list[object] = []
                for _ in range(100_000):
                    value = [value]
                return value
            case "value that raises":
                return NoList()
        return NAMES[int(outputs["act"])]

    def _act(self, act: str, outputs: dict[str, torch.Tensor], num_rows: int) -> None:
        match act:
            case "long text":
                raise ValueError("x" * LONG)
            case "long bytes":
                raise ValueError(b"x" * LONG)
            case "long key":
                raise KeyError("x" * LONG)
            case "long cause":
                raise RuntimeError("short") from ValueError("x" * LONG)
            case "long note":
                error = ValueError("short")
                error.add_note("x" * LONG)
                raise error
            case "no text":
                raise WordlessError
            case "cancelled":
                raise asyncio.CancelledError
            case "many outputs":
                outputs |= {f"y{n}": torch.zeros(num_rows) for n in range(20_000)}
            case "name of a number":
                outputs[1] = torch.zeros(num_rows)  # type: ignore[index]  # which is the point
            case "long name":
                outputs["n" * 10_000] = torch.zeros(num_rows)
            case "surrogate name":
                outputs["\ud800"] = torch.zeros(num_rows)
            case "huge output":
                outputs["y"] = torch.zeros(1, 1).expand(num_rows, 1 << 28)
            case "sparse output":
                outputs["y"] = torch.zeros(num_rows, 2).to_sparse()
            case "quantized output":
                outputs["y"] = torch.quantize_per_tensor(
                    torch.zeros(num_rows, 2), 0.1, 0, torch.qint8
                )
            case "complex output":
                outputs["y"] = torch.zeros(num_rows, dtype=torch.complex64)
            case "long log":
                logger.error("x" * LONG)
            case "log without text":
                logger.error("%s", NoList())
            case "long warning":
                warnings.warn("x" * LONG, stacklevel=1)
            case "long print":
                sys.stdout.write("x" * LONG)
