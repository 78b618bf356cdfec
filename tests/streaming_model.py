"""Models that answer in parts, as their input says, and whose right parts are known."""

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import inferpool
from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec

DEEDS = (
    *("ok", "raise", "input", "nan", "object", "big", "position", "kill", "hang", "exit"),
    *("early", "unready", "admit", "device"),
)
_BIG_BYTES = 1 << 19


class CountingStream(Model):
    """Counts: {"n": 7, "parts": 3} is answered by 7, 8, 9, the parts of one instance alone.

    More of an instance: "delay_s", the seconds before each part; "do", a deed before its part
    number "at" (0 is the first one, and the default). "early" raises while it is prepared,
    "unready" an `InputError` then, and "admit" when the stream joins.
    """

    example: object = {"n": 5, "parts": 2}  # of models too

    def __init__(self, *, closed: str | None = None, once: str | None = None) -> None:
        """Take files.

        Args:
            closed: A file that gets the number "n" of each stream whose generator is over.
            once: A file; "kill", "hang" and "exit" create it, and do nothing if it exists.
        """
        self._closed = Path(closed) if closed else None
        self._once = Path(once) if once else None

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        if not isinstance(value, dict) or not isinstance(value.get("n"), int):
            raise InputError('an instance is {"n": number, "parts": number, ...}')
        deed = value.get("do", "ok")
        if deed == "early":
            raise RuntimeError("I was told to, early")
        if deed == "unready":
            raise InputError("I was told to, early")
        plan = [value["n"], value.get("parts", 3), DEEDS.index(deed), value.get("at", 0)]
        delay_s = float(value.get("delay_s", 0.0))
        return {"plan": torch.tensor(plan), "delay_s": torch.tensor(delay_s, dtype=torch.float64)}

    def forward(self, batch: Features) -> Iterator[object]:
        (row,) = rows_of(batch)
        try:
            for number in range(row.num_parts):
                time.sleep(row.delay_s)
                yield self.part_of(row, number)
        finally:
            self.close(row)

    def part_of(self, row: "CountedRow", number: int) -> object:
        """Do what the instance says, and return its part of a number."""
        if number == row.at:
            match row.deed:
                case "raise":
                    raise ValueError(f"I was told to, at part {number}")
                case "input":
                    raise InputError(f"I was told to, at part {number}")
                case "nan":
                    return float("nan")
                case "object":
                    return object()
                case "device":
                    raise torch.AcceleratorError("CUDA error: device-side assert triggered")
                case "big":
                    return "x" * _BIG_BYTES
                case "kill" | "hang" | "exit" if self._is_first():
                    _end(row.deed)
        return row.n + number

    def close(self, row: "CountedRow") -> None:
        """Write down that a stream is over."""
        if self._closed:
            with self._closed.open("a") as file:
                file.write(f"{row.n}\n")

    def _is_first(self) -> bool:
        try:
            if self._once:
                self._once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class CountedRow:
    """One instance of a batch of a `CountingStream`."""

    def __init__(self, plan: Tensor, delay_s: Tensor) -> None:
        self.n, self.num_parts, deed, self.at = map(int, plan)
        self.deed = DEEDS[deed]
        self.delay_s = float(delay_s)


def rows_of(batch: Features) -> list[CountedRow]:
    return [CountedRow(*row) for row in zip(batch["plan"], batch["delay_s"], strict=True)]


def _end(deed: str) -> None:
    match deed:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
        case "exit":
            os._exit(7)


class AsyncCountingStream(CountingStream):
    """A `CountingStream` whose generator is an asynchronous one."""

    async def stream(self, batch: Features) -> AsyncIterator[object]:
        """Count."""
        for part in super().forward(batch):
            yield part


class TensorStream(CountingStream):
    """A `CountingStream` whose parts are tensors, which `postprocess` and `render` make texts of.

    The parameter "prefix" is the first part of each text; "refuse" is refused by `render`.
    """

    outputs: Sequence[TensorSpec] = (TensorSpec(name="y", dtype="float32", shape=(-1, 2)),)

    def forward(self, batch: Features) -> Iterator[object]:
        for number in super().forward(batch):
            yield {"y": torch.tensor([[float(number), 1.0]])}  # type: ignore[arg-type]  # a number

    def postprocess(self, outputs: Features) -> Features:
        return {"y": outputs["y"] * 2}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        if "refuse" in parameters:
            raise InputError("this parameter cannot be")
        return f"{parameters.get('prefix', '')}{outputs['y'][0]:g}"


class CountingBatches(CountingStream):
    """Counts for the instances of a batch together; each has a part in each step until its end."""

    def stream(self, batch: Features) -> Iterator[object]:
        """Count for all."""
        self.rows: dict[int, CountedRow] = {}
        self.numbers: dict[int, int] = {}
        self.admit(batch, range(len(batch["plan"])))
        with contextlib.suppress(KeyError):
            while self.rows:
                yield self.step()

    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        """Begin to count for some more."""
        for position, row in zip(positions, rows_of(batch), strict=True):
            if row.deed == "admit":
                raise ValueError("I was told to, when it was admitted")
            self.rows[position] = row
            self.numbers[position] = 0

    def drop(self, position: int) -> None:
        """Count for one no more."""
        self.close(self.rows.pop(position))

    def step(self) -> object:
        """Return the next part of each stream, or its end."""
        time.sleep(max(row.delay_s for row in self.rows.values()))
        parts: dict[int, object] = {}
        for position, row in [*self.rows.items()]:
            number = self.numbers[position]
            if number == row.num_parts:
                parts[position] = inferpool.END
                self.drop(position)
                continue
            if number == row.at and row.deed == "position":
                parts[1000] = "of nobody"
            parts[position] = self.part_of(row, number)
            self.numbers[position] = number + 1
        return parts


class JoiningStream(CountingBatches):
    """A `CountingBatches` that new streams join; each step takes the same time, 10 ms at first."""

    joins = True

    def __init__(self, *, step_s: float = 0.01, **options: object) -> None:
        """Take the seconds of a step, and the options of `CountingStream`."""
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._step_s = step_s

    def step(self) -> object:
        """Wait, and return the next parts."""
        time.sleep(self._step_s)
        return super().step()
