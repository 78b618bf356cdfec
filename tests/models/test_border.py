"""Wrong return values of a model's methods, and the errors that tell its author."""

import math
import re
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.errors import BadReturnError, InputError
from inferpool.models.example import own_example, shown_example
from inferpool.models.item import Features, Item
from inferpool.models.overrides import forward_can_run_ahead, place_of, rendering_of
from inferpool.models.spec import Placement, TensorSpec
from inferpool.workers.inside.compute import Computer
from inferpool.workers.shared.messages import ItemRef
from inferpool.workers.start_check.own_passes import OwnPasses

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
}
LISTS = {
    "an empty list": list,
    "tuple; a list has one element for each instance": lambda: (torch.zeros(3), torch.zeros(3)),
    "str as element 1 of 'x'": lambda: {"x": [torch.zeros(3), "cat"]},
    "list as element 0 of 'x'": lambda: [{"x": [torch.zeros(3)]}],
    "a list with Tensor as element 1": lambda: [{"x": torch.zeros(3)}, torch.zeros(3)],
    "a list of dicts with other names: element 1 has 'z', element 0 has 'x'": (
        lambda: [{"x": torch.zeros(3)}, {"z": torch.zeros(3)}]
    ),
}
TENSORS = "a dict of tensors by name"
ITEMS = "a list of inferpool.models.base.Item"
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
    *(("preprocess", TENSORS, found) for found in VALUES),
    *(
        (method, f"{TENSORS}, or of lists with a tensor for each instance", found)
        for method in ("forward", "postprocess")
        for found in sorted((VALUES | LISTS).keys() - {"Tensor", "list"})
    ),
    *(
        ("collate", TENSORS, each)
        for each in ("None", "a coroutine (write `def`, not `async def`)")
    ),
    *(("render_batch", "a list of 1 values", each) for each in ("None", "str")),
    ("render_batch", "a list of 1 values", "3 of them"),
    *((method, ITEMS, each) for method in ("warmup", "samples") for each in ("None", "str")),
    ("warmup", ITEMS, "Tensor in it"),
    ("encoded_samples", ITEMS, "None"),
    ("load", "None", "a coroutine (write `def`, not `async def`)"),
    ("bucket", "something hashable", "list"),
]


@pytest.mark.parametrize(("method", "must", "found"), WRONG)
def test_wrong_return_is_told_with_the_method_and_its_place(method: str, must: str, found: str):
    make = (VALUES | LISTS)[
        {"Tensor in it": "list", "3 of them": "numpy.ndarray"}.get(found, found)
    ]

    class Wrong(Good):
        pass

    if method == "preprocess":  # a model's own `collate` may take anything
        Wrong.collate = Model.collate  # type: ignore[method-assign]

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
    class Plain(Model):
        pass

    plain = checked(Plain())
    assert type(plain) is Plain
    assert [name for name in vars(Plain) if not name.startswith("__")] == ["load"]
    assert place_of(Good(), "forward").startswith(f"{Path(__file__)}:")


class Sums(Model):
    """Sums each instance; the tests below do it in other ways that have served."""

    inputs = (X,)

    def forward(self, batch: Any) -> Any:
        return {"y": batch["x"].sum(1)}

    def warmup(self) -> Any:
        return [item(b"[1.0, 2.0, 3.0]")]


class CallableSum:
    def __call__(self, batch: Any) -> Any:
        return {"y": batch["x"].sum(1)}


def generated(self: Model) -> Any:
    yield item(b"[1.0, 2.0, 3.0]")


def stacked(self: Model, instances: Any) -> Any:
    return {"x": torch.stack([each["x"] for each in instances])}


OVERRIDES: dict[str, dict[str, Any]] = {
    "static postprocess": {"postprocess": staticmethod(lambda outputs: outputs)},
    "class preprocess": {
        "preprocess": classmethod(lambda cls, item: {"x": torch.tensor(item.json())})
    },
    "static bucket": {"bucket": staticmethod(lambda features: 0)},
    "callable object as forward": {"forward": CallableSum()},
    "generator as warmup": {"warmup": generated},
    "load that returns": {"load": lambda self, placement: self},
    "tensor as example": {"example": torch.zeros(1, 3)},
    "method as example": {"example": lambda self, wanted: wanted},
    "NumPy rendered": {"render_batch": lambda self, outputs, parameters: outputs["y"].numpy()},
    "generator rendered": {
        "render_batch": lambda self, outputs, parameters: (float(each) for each in outputs["y"])
    },
    "list in the batch": {
        "collate": lambda self, instances: {**stacked(self, instances), "n": [1] * len(instances)}
    },
    "tensor preprocessed": {
        "preprocess": lambda self, item: torch.tensor(item.json()),
        "collate": lambda self, instances: {"x": torch.stack(list(instances))},
    },
    "number preprocessed": {
        "preprocess": lambda self, item: {"x": torch.tensor(item.json()), "scale": 5},
        "collate": stacked,
    },
    "lists preprocessed": {
        "preprocess": lambda self, item: {"x": item.json()},
        "collate": lambda self, instances: {"x": torch.tensor([each["x"] for each in instances])},
    },
    "NumPy postprocessed": {
        "finite_outputs": False,
        "postprocess": lambda self, outputs: {"y": outputs["y"].numpy()},
        "render": lambda self, outputs, parameters: float(outputs["y"]),
    },
    "output named by a number": {"forward": lambda self, batch: {0: batch["x"].sum(1)}},
    "view as inputs": {"inputs": {"x": X}.values()},
}


class CollatesATensor(Sums):
    def collate(self, instances: Any) -> Any:
        return torch.stack([each["x"] for each in instances])

    def forward(self, batch: Any) -> Any:
        assert len(batch) == 2, "it is computed at once"
        return {"y": batch.sum(1)}

    def warmup(self) -> Any:
        return []


class NamesItsOwnClass(Sums):
    def preprocess(self, item: Item) -> Any:
        return super(self.__class__, self).preprocess(item)


class RendersByKeyword(Sums):
    def render_batch(self, outputs: Any, parameters: Any) -> Any:
        if len(outputs["y"]) == 1:
            return [float(outputs["y"])]
        return [
            self.render_batch(outputs={"y": each[None]}, parameters=[{}])[0]
            for each in outputs["y"]
        ]


class _Tagged(Sums):
    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class IsTagged(_Tagged, tag="a"):
    pass


def assert_serves(kind: type[Sums]) -> None:
    for _ in range(2):  # a class may be built more than once
        model = checked(kind())
        model.load(CPU)
        samples = list(model.warmup())
        shown_example(model, own_example(model), samples)
        computer = Computer(model, num_threads=1)
        if samples:
            OwnPasses(computer).warm_up(samples, (1, 2))
        payload = b"[1.0, 2.0, 3.0]"
        refs = [ItemRef("json", 0, len(payload), math.inf)] * 2
        assert (
            computer.compute(computer.prepare(1, refs, [memoryview(payload)] * 2)) == [b"6.0"] * 2
        )
    assert type(model) is kind


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_model_that_is_loose_with_an_override_serves(overrides: dict[str, Any]):
    assert_serves(type("Own", (Sums,), overrides))


@pytest.mark.parametrize("kind", [CollatesATensor, NamesItsOwnClass, RendersByKeyword, IsTagged])
def test_model_of_an_unusual_class_serves(kind: type[Sums]):
    assert_serves(kind)


def test_example_that_cannot_be_shown_is_logged(caplog: pytest.LogCaptureFixture):
    class Own(Sums):
        example = torch.zeros(1, 3)

    model = checked(Own())
    assert shown_example(model, own_example(model), []) == b""
    assert "example is not shown: BadReturnError: " in caplog.text
    assert "Own.example must be" in caplog.text


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
        (
            [TensorSpec(name="x", dtype="int8", shape=(2, 3))],
            r"the shape of 'x' must begin with -1.*: write \[-1, 2, 3\], not \[2, 3\]",
        ),
        ([TensorSpec(name="x", dtype="int8", shape=(None, 3))], r"not \(None, 3\)"),  # type: ignore[arg-type]
        ([TensorSpec(name="x", dtype="int8", shape=3)], "whole numbers, .*, not 3"),  # type: ignore[arg-type]
    ],
)
def test_declarations_are_checked_once_the_model_is_loaded(name: str, specs: Any, told: str):
    model = checked(Good())
    setattr(model, name, specs)
    with pytest.raises(BadReturnError, match=f"Good.{name}.*{told}"):
        model.load(CPU)


class Batched(Model):
    def render_batch(self, outputs: Any, parameters: Any) -> Any:
        return ["batch"] * len(parameters)


class RenderedBelow(Batched):
    def render(self, outputs: Any, parameters: Any) -> Any:
        return "one"


class BothBelow(RenderedBelow):
    def render(self, outputs: Any, parameters: Any) -> Any:
        return "one"

    def render_batch(self, outputs: Any, parameters: Any) -> Any:
        return ["batch again"] * len(parameters)


class Mixin:
    def render(self, outputs: Any, parameters: Any) -> Any:
        return "mixed in"


class MixedIn(Mixin, BothBelow):
    pass


class BatchBelow(RenderedBelow):
    def render_batch(self, outputs: Any, parameters: Any) -> Any:
        return super().render_batch(outputs, parameters)


class JustBelow(RenderedBelow):
    pass


class Plain(Model):
    pass


def other_batch(self: Model, outputs: Any, parameters: Any) -> Any:
    return ["other"] * len(parameters)


def wrapped(method: Any) -> Any:
    """Decorate a method as a user's timer does."""

    @wraps(method)
    def call(*args: Any) -> Any:
        return f"wrapped {method(*args)}"

    return call


class WrapsInherited(BothBelow):
    """Wraps the method of a class above, which is still the one that it says itself."""

    render = wrapped(RenderedBelow.render)


class Aliased(RenderedBelow):
    render_batch = other_batch


class AliasesOfAbove(BothBelow):
    render = RenderedBelow.render


@pytest.mark.parametrize(
    ("kind", "name", "answers"),
    [
        (Batched, "render_batch", ["batch", "batch"]),
        (RenderedBelow, "render", ["one", "one"]),
        (BothBelow, "render_batch", ["batch again", "batch again"]),
        (MixedIn, "render", ["mixed in", "mixed in"]),
        (BatchBelow, "render_batch", ["batch", "batch"]),
        (JustBelow, "render", ["one", "one"]),
        (Plain, "render", [[1.0], [2.0]]),
        (WrapsInherited, "render", ["wrapped one", "wrapped one"]),
        (Aliased, "render_batch", ["other", "other"]),
        (AliasesOfAbove, "render", ["one", "one"]),
    ],
)
def test_of_the_methods_that_render_the_nearest_in_the_class_order_is_used(
    kind: type[Model], name: str, answers: list[object]
):
    for model in (kind(), checked(kind()), checked(kind())):  # whose methods are put on the class
        found, render_batch = rendering_of(model)
        assert (found, render_batch({"y": torch.tensor([[1.0], [2.0]])}, [{}, {}])) == (
            name,
            answers,
        )


class SaysAhead(Good):
    can_run_ahead = True


class InheritsAhead(SaysAhead):
    def load(self, placement: Placement) -> None: ...


class OwnForward(SaysAhead):
    def forward(self, batch: Features) -> Features:
        return batch


@pytest.mark.parametrize(
    ("kind", "can_run_ahead"), [(SaysAhead, True), (InheritsAhead, True), (OwnForward, False)]
)
def test_only_a_forward_of_its_own_takes_back_what_a_class_above_says(
    kind: type[Model], can_run_ahead: bool
):
    for model in (kind(), checked(kind()), checked(kind())):  # which puts `forward` on the class
        assert forward_can_run_ahead(model) == can_run_ahead
