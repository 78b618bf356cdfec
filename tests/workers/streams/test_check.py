"""The check of a model that answers in parts, at the start of its worker."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from inferpool.workers.inside.process import load
from inferpool.workers.shared.messages import Ready
from tests.models.items import json_item
from tests.workers.contract import config_of

HERE = "test_check.py"


class Sounding(Model):
    """Yields a text and tensors for one instance."""

    example: object = 3
    numbers = itertools.count()

    def preprocess(self, item: Item) -> Features:
        number = item.json()
        if not isinstance(number, int):
            raise InputError("a number")
        return {"x": torch.tensor([float(number)])}

    def forward(self, batch: Features) -> Iterator[Any]:
        yield "begin"
        for number in range(int(batch["x"][0, 0])):
            yield self.part(number)

    def part(self, number: int) -> object:
        return {"y": torch.tensor([[float(number)]])}


class Together(Sounding):
    """Yields parts by position."""

    def stream(self, batch: Features) -> Iterator[object]:
        x_B1 = batch["x"]
        for number in range(int(x_B1.max())):
            yield {row: self.of(x_B1, row, number) for row in range(len(x_B1))}

    def of(self, x: torch.Tensor, row: int, number: int) -> object:
        return float(x[row, 0]) + number


class JoiningSound(Sounding):
    """Yields parts by position to streams that join."""

    joins = True

    def stream(self, batch: Features) -> Iterator[object]:
        self.left: dict[int, float] = {}
        self.admit(batch, range(len(batch["x"])))
        while True:
            for position in self.left:
                self.left[position] += 1
            yield self.left.copy()

    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        for position, x in zip(positions, batch["x"], strict=True):
            self.left[position] = float(x[0])


class FailsLate(Sounding):
    def part(self, number: int) -> object:
        if number == 1:
            raise KeyError("late")
        return number


class GivesNan(Sounding):
    def part(self, number: int) -> object:
        return {"y": torch.full((1, 1), torch.nan)}


class GivesObjects(Sounding):
    def part(self, number: int) -> object:
        return object()


class GivesRows(Sounding):
    def part(self, number: int) -> object:
        return {"y": torch.zeros(3, 1)}


class GivesAnother(Sounding):
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 2)),)


class Drawing(Sounding):
    def part(self, number: int) -> object:
        return {"y": torch.tensor([[float(next(self.numbers))]])}


class DrawingText(Sounding):
    def part(self, number: int) -> object:
        return f"number {next(self.numbers)}"


class DrawingNumbers(Sounding):
    def forward(self, batch: Features) -> Iterator[Any]:
        yield from range(next(self.numbers) % 3)


class AskedBeside(Together):
    def of(self, x: torch.Tensor, row: int, number: int) -> object:
        return float(x.sum())


class OfTheFirst(JoiningSound):
    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        super().admit(batch, positions)
        for position in positions:
            self.left[position] += 100 * position


class CannotJoin(JoiningSound):
    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        if self.left:
            raise IndexError("no more")
        super().admit(batch, positions)


class NoAdmit(Sounding):
    joins = True


class PlainStream(Sounding):
    def stream(self, batch: Features) -> object:
        return [1, 2]


class CoroutineStream(Sounding):
    async def stream(self, batch: Features) -> object:
        return [1, 2]


def ready_of(model: Model, **config: Any) -> Ready:
    """Load a model as a worker does."""
    _, ready = load(config_of(**config), lambda stage: None, build=lambda _: checked(model))
    return ready


@pytest.mark.parametrize("kind", [Sounding, Together, JoiningSound])
def test_sound_models_are_ready_without_a_word(kind: type[Model]):
    ready = ready_of(kind())
    assert ready.checked.warnings == ready.checked.not_checked == ()
    assert ready.checked.is_sample_finite
    assert ready.interface.streams
    assert ready.interface.alone == (kind is Sounding)
    assert ready.interface.joins == (kind is JoiningSound)
    assert ready.speed.note == "it answers in parts"


REFUSED: dict[type[Model], str] = {
    FailsLate: rf"fails on its own example: forward raised KeyError: 'late' \(.*{HERE}:\d+\)",
    GivesNan: r"has NaN or an infinity in it.*`finite_outputs = False`",
    GivesObjects: r"must be a value that JSON can say, got a object",
    GivesRows: r"returned 3 rows of 'y' for a batch of 1",
    GivesAnother: r"returned 'y' of shape \[1\] for each instance, where it declares \[2\]",
    Drawing: r"asked the same again \(part 1: .*`repeatable = False`",
    DrawingText: r"asked the same again \(another part 1\)",
    DrawingNumbers: r"asked the same again \(1 parts instead of 0\)|\(2 parts instead of 1\)|\(0 ",
    AskedBeside: r"beside another instance than alone \(another part 0\).*alone_as_in_batch",
    OfTheFirst: r"beside another instance than alone \(another part 0\)",
    CannotJoin: r"beside another instance: admit raised IndexError: no more",
    NoAdmit: r"has `joins = True`, and must define admit\(batch, positions\)",
    PlainStream: r"stream raised TypeError: stream must be a generator",
    CoroutineStream: r"stream raised TypeError: stream must be a generator",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_model_whose_parts_cannot_be_right_is_refused(kind: type[Model]):
    with pytest.raises(ModelError, match=REFUSED[kind]):
        ready_of(kind())


@pytest.mark.parametrize("kind", [Drawing, DrawingText])
def test_model_may_say_that_its_parts_differ(kind: type[Model]):
    model = kind()
    model.repeatable = False
    assert ready_of(model).checked.declared == ("repeatable = False",)


def test_models_that_stream_are_not_split_and_get_no_preset():
    pair = Placement(devices=("cpu", "cpu"), split="pipeline")
    for config, text in (
        ({"placement": pair}, "cannot be split over devices"),
        ({"speed": "bf16"}, 'answers in parts: speed = "bf16" cannot be used'),
        ({"decode": "fast"}, 'answers in parts: decode = "fast" cannot be used'),
    ):
        with pytest.raises(ModelError, match=text):
            ready_of(Sounding(), **config)


def test_kind_of_the_parts_is_learnt_though_the_check_is_off():
    assert ready_of(Sounding(), check="off").interface.alone
    assert not ready_of(Together(), check="off").interface.alone


def test_attribute_that_is_called_stream_is_no_generator():
    class OnDevice(Sounding):
        def load(self, placement: Placement) -> None:
            self.stream = torch.Stream

    class Plain(OnDevice):
        def forward(self, batch: Features) -> Any:
            return {"y": batch["x"]}

    assert ready_of(OnDevice()).interface.alone
    assert not ready_of(Plain()).interface.streams


class Endless(Sounding):
    """Never ends, and its first step takes longest."""

    def forward(self, batch: Features) -> Iterator[Any]:
        while True:
            yield 0

    def warmup(self) -> Sequence[Item]:
        return [json_item(3)]


def test_endless_streams_are_checked_and_warmed_by_their_first_parts():
    ready = ready_of(Endless())
    assert ready.warmup_s is not None
    assert ready.warmup_s < 30
    assert ready.checked.warnings == ()
