import os

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError, SourceError
from inferpool.models.item import Features, Item
from inferpool.models.sources import poisonable
from inferpool.models.sources.registry import build


class Strict(Model):
    """Refuses parameters that it does not know, and has attributes of its own."""

    max_image_pixels = 5

    def __init__(self, *, factor: int = 2) -> None:
        self.factor = factor

    def preprocess(self, item: Item) -> Features:
        if item.parameters:
            raise InputError("no parameters")
        return {"x": torch.tensor(len(item.payload))}

    def forward(self, batch: Features) -> Features:
        assert set(batch) == {"x"}
        return {"y": batch["x"] * self.factor}


class DeathError(Exception):
    pass


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        raise DeathError

    monkeypatch.setattr("inferpool.models.sources.poisonable.os.kill", kill)


def item(**parameters: object) -> Item:
    return Item(kind="bytes", payload=memoryview(b"abc"), parameters=parameters)


def wrapped(**options: object) -> Model:
    inner = {"source": f"{__name__}:Strict", "options": options}
    return build("inferpool.models.sources.poisonable:Poisonable", "DEFAULT", inner)


def ask(model: Model, *items: Item) -> object:
    batch = model.collate([model.preprocess(each) for each in items])
    outputs = model.postprocess(model.forward(batch))
    return model.render_batch(outputs, [each.parameters for each in items])


def test_model_without_poison_is_the_users_own_in_all_else():
    model = wrapped(factor=3)
    assert isinstance(model, Strict)
    assert ask(model, item(), item()) == [9, 9]
    with pytest.raises(InputError, match="no parameters"):
        ask(model, item(other=1))
    with pytest.raises(SourceError, match="factr"):
        wrapped(factr=3)


def test_poisoned_input_dies_where_it_says():
    model = wrapped()
    with pytest.raises(DeathError):
        model.preprocess(item(inferpool_chaos="preprocess-1"))

    for_forward = item(inferpool_chaos="forward-2")
    batch = model.collate([model.preprocess(each) for each in (item(), for_forward)])
    with pytest.raises(DeathError):
        model.forward(batch)

    for_render = item(inferpool_chaos="render")
    outputs = model.forward(model.collate([model.preprocess(for_render)]))
    with pytest.raises(DeathError):
        model.render_batch(outputs, [for_render.parameters])


def test_chaos_and_the_model_mean_the_same_parameter_and_places():
    from inferpool.service.tools.chaos.faults import PARAMETER, PLACES

    assert PARAMETER == poisonable.PARAMETER
    for place in PLACES:
        with pytest.raises(DeathError):
            ask(wrapped(), item(inferpool_chaos=f"{place}-0"))
