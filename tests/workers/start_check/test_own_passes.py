from types import SimpleNamespace

import pytest
import torch

import inferpool.workers.start_check.own_passes
from inferpool.models.errors import ModelError
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec
from inferpool.models.speed_names import LONG_S
from inferpool.workers.start_check.own_passes import OwnPasses
from tests.workers.inside.test_compute import DoublingModel, computer_of


def test_model_that_breaks_its_promises_on_its_own_sample_cannot_be_loaded():
    class MisdeclaredModel(DoublingModel):
        outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 7)),)

    computer = computer_of(MisdeclaredModel())
    with pytest.raises(ModelError, match=r"declares \[7\]"):
        OwnPasses(computer).warm_up([Item(kind="json", payload=memoryview(b"1"))], (1, 2))


@pytest.mark.parametrize("shortage", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_sizes_that_may_come_later_are_warmed_up_as_far_as_they_fit_and_take_short(
    shortage, monkeypatch
):
    now = 0.0

    def compute(x):
        nonlocal now
        if len(x) > 4 and shortage:
            raise shortage
        now += 2 * LONG_S if len(x) > 4 else 0.0
        return x * 2

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(inferpool.workers.start_check.own_passes, "time", clock)
    model = DoublingModel(compute)
    samples = [Item(kind="json", payload=memoryview(b"1"))]
    OwnPasses(computer_of(model)).warm_up(samples, (1, 2, 4, 8, 16), needed=2)
    # Twice, since the first of a size may take long.
    assert model.sizes == [1, 2, 2, 4, 4, *([8] if shortage else [8, 8])]
    if shortage:
        with pytest.raises(torch.OutOfMemoryError):
            OwnPasses(computer_of(model)).warm_up(samples, (1, 8), needed=8)


def test_warm_up_tells_the_time_of_its_longest_batch_with_the_preparation_of_its_items(monkeypatch):
    now = 0.0

    def compute(x):
        nonlocal now
        now += 0.3
        return x * 2

    class Slow(DoublingModel):
        def preprocess(self, item: Item) -> Features:
            nonlocal now
            now += 0.05
            return super().preprocess(item)

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(inferpool.workers.start_check.own_passes, "time", clock)
    samples = [Item(kind="json", payload=memoryview(b"1"))] * 2
    longest_s = OwnPasses(computer_of(Slow(compute))).warm_up(samples, (1, 8))
    assert longest_s == pytest.approx(0.3 + 8 * 0.05)
