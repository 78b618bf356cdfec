"""What a model's methods return by mistake, and what its author is told of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.base import Features, Item, Model
from models.border import checked, place_of
from models.errors import BadReturnError, InputError
from models.spec import Placement, TensorSpec

CPU = Placement(devices=("cpu",))
X = TensorSpec(name="x", dtype="float32", shape=(-1, 3))


class Good(Model):
    """Right in all that it does."""

    inputs = (X,)

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.tensor(item.json())}

    def bucket(self, features: Features) -> int:
        return 1

    def collate(self, instances: Any) -> Features:
        return super().collate(instances)

    def forward(self, batch: Features) -> Features:
        return batch

    def postprocess(self, outputs: Features) -> Features:
        return outputs

    def render_batch(self, outputs: Features, parameters: Any) -> Any:
        return super().render_batch(outputs, parameters)

    def warmup(self) -> Any:
        return [item(b"[1.0, 2.0, 3.0]")]

    def samples(self) -> Any:
        return self.warmup()

    def encoded_samples(self) -> Any:
        return []


def item(payload: bytes) -> Item:
    return Item(kind="json", payload=memoryview(payload))


async def _coroutine() -> None:
    pass


def _generator() -> Iterator[int]:
    yield 1


VALUES = {
    "None": lambda: None,
    "Tensor": lambda: torch.zeros(3),
    "numpy.ndarray": lambda: np.zeros(3),
    "list": lambda: [torch.zeros(3)],
    "str": lambda: "x",
    "a coroutine (write `def`, not `async def`)": _coroutine,
    "a generator (it has a `yield` in it)": _generator,
    "numpy.ndarray as 'x'": lambda: {"x": np.zeros(3)},
    "a name of type int": lambda: {0: torch.zeros(3)},
}
TENSORS = "a dict of tensors by name"
ITEMS = "a list of models.base.Item"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "preprocess": (item(b"[1.0, 2.0, 3.0]"),),
    "collate": ([{"x": torch.zeros(3)}],),
    "forward": ({"x": torch.zeros(1, 3)},),
    "postprocess": ({"x": torch.zeros(1, 3)},),
    "render_batch": ({"x": torch.zeros(1, 3)}, [{}]),
    "warmup": (),
    "samples": (),
    "encoded_samples": (),
    "load": (CPU,),
    "bucket": ({"x": torch.zeros(3)},),
}
WRONG = [
    *(
        (method, TENSORS, found)
        for method in ("preprocess", "collate", "forward", "postprocess")
        for found in VALUES
    ),
    *(("render_batch", "a list of 1 values", each) for each in ("None", "str", "Tensor")),
    *((method, ITEMS, each) for method in ("warmup", "samples") for each in ("None", "str")),
    ("warmup", ITEMS, "Tensor in it"),
    ("encoded_samples", ITEMS, "None"),
    ("load", "None", "Tensor"),
    ("load", "None", "a coroutine (write `def`, not `async def`)"),
    ("bucket", "something hashable", "list"),
]


@pytest.mark.parametrize(("method", "must", "found"), WRONG)
def test_wrong_return_is_told_with_the_method_and_its_place(method: str, must: str, found: str):
    make = VALUES["list" if found == "Tensor in it" else found]

    class Wrong(Good):
        pass

    def wrong(self: Model, *_: object) -> object:
        return make()

    setattr(Wrong, method, wrong)
    with pytest.raises(BadReturnError) as raised:
        getattr(checked(Wrong()), method)(*ARGUMENTS[method])
    place = f"{Path(__file__)}:{wrong.__code__.co_firstlineno}"
    pattern = f"{method} must return {must}.*, got {re.escape(found)} \\({re.escape(place)}\\)"
    assert re.fullmatch(pattern, str(raised.value))


def test_right_returns_pass():
    model = checked(Good())
    model.load(CPU)
    for method, arguments in ARGUMENTS.items():
        if method != "load":
            getattr(model, method)(*arguments)


def test_methods_that_a_model_does_not_override_are_left_alone():
    plain = checked(Model())
    assert [name for name in vars(type(plain)) if not name.startswith("__")] == ["load"]
    assert (type(plain).__name__, type(plain).__module__) == ("Model", "models.base")
    assert place_of(Good(), "forward").startswith(f"{Path(__file__)}:")


@pytest.mark.parametrize(
    ("yielded", "told"),
    [
        ({"x": torch.zeros(3).double()}, "'x' as float32, as `inputs` declares, got float64"),
        ({"y": torch.zeros(3)}, "'x', which `inputs` declares, got 'y'"),
        ({}, "'x', which `inputs` declares, got an empty dict"),
    ],
)
def test_preprocess_is_held_against_the_declared_inputs(yielded: Any, told: str):
    class Own(Good):
        def preprocess(self, item: Item) -> Features:
            return yielded  # type: ignore[no-any-return]

    with pytest.raises(BadReturnError, match=re.escape(told)):
        checked(Own()).preprocess(item(b""))


def test_shape_that_does_not_fit_is_the_clients_mistake():
    with pytest.raises(InputError, match=r"'x': expected shape \[3\], found \[4\]"):
        checked(Good()).preprocess(item(b"[1.0, 2.0, 3.0, 4.0]"))


def test_preprocess_may_yield_what_it_declares_beside_the_inputs():
    class Own(Good):
        preprocessed = (TensorSpec(name="y", dtype="float64", shape=(-1,)),)

        def preprocess(self, item: Item) -> Features:
            return {"y": torch.tensor(1.0, dtype=torch.float64)}

    checked(Own()).preprocess(item(b""))


@pytest.mark.parametrize("name", ["inputs", "outputs", "preprocessed"])
@pytest.mark.parametrize(
    ("specs", "told"),
    [
        (X, "must be a list of specs"),
        ("x", "must be a list of specs"),
        ([("x", "float32", (3,))], "must be a list of specs such as .*, not of tuple"),
        ([TensorSpec(name="x", dtype=torch.float32, shape=(-1,))], "not torch.float32"),  # type: ignore[arg-type]
        ([TensorSpec(name="x", dtype="float", shape=(-1,))], "must be one of .*, not 'float'"),
        ([TensorSpec(name="x", dtype="int8", shape=(None, 3))], r"not \(None, 3\)"),  # type: ignore[arg-type]
        ([TensorSpec(name="x", dtype="int8", shape=3)], "whole numbers, .*, not 3"),  # type: ignore[arg-type]
    ],
)
def test_declarations_are_checked_once_the_model_is_loaded(name: str, specs: Any, told: str):
    model = checked(Good())
    setattr(model, name, specs)
    with pytest.raises(BadReturnError, match=f"Good.{name}.*{told}"):
        model.load(CPU)
