"""Groups of a batch that are cut by the tokens that the model counts."""

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.workers.inside.own_process import build_model
from inferpool.workers.inside.preparing import Preparer, unprepared
from inferpool.workers.shared.messages import ItemRef
from tests.workers.contract import config_of


class CountingModel(Model):
    """Adds numbers up; each counts for as many tokens as it has elements."""

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.ones(int(item.json()))}  # type: ignore[call-overload]

    def bucket(self, features: Features) -> Hashable:
        return len(features["x"]) > 50

    def num_tokens(self, features: Features) -> int:
        return len(features["x"])

    def collate(self, instances: Sequence[Features]) -> Features:
        return {"x": torch.nn.utils.rnn.pad_sequence([each["x"] for each in instances], True)}


class RaisingModel(CountingModel):
    """Cannot count."""

    def num_tokens(self, features: Features) -> int:
        raise KeyError("tokens")


def groups_of(
    model_class: type[Model], lengths: Sequence[int], most: int | None
) -> list[list[int]]:
    """Return the lengths of the instances of each group, in a worker with a bound."""
    source = f"{__name__}:{model_class.__name__}"
    model = build_model(replace(config_of(source), max_batch_tokens=most))
    preparer = Preparer(model, num_threads=1, staging=None, error_detail="name")
    payloads = [memoryview(msgspec.json.encode(each)) for each in lengths]
    refs = [ItemRef("json", 0, len(each), math.inf) for each in payloads]
    prepared = preparer.prepare(unprepared(1, refs, payloads))
    assert not any(prepared.outcomes)
    assert all(group.batch is not None for group in prepared.groups)
    return [[lengths[i] for i in group.indices] for group in prepared.groups]


def test_without_a_bound_all_of_a_bucket_are_computed_together():
    assert groups_of(CountingModel, [10, 60, 10, 90], None) == [[10, 10], [60, 90]]


def test_a_group_ends_where_it_would_have_more_tokens_than_the_bound():
    lengths = [10, 60, 30, 20, 90, 200, 40]
    assert groups_of(CountingModel, lengths, 100) == [[10, 30, 20, 40], [60], [90], [200]]


def test_no_sum_is_above_the_bound_and_each_instance_comes_once_in_order():
    chance = random.Random(5)
    for _ in range(20):
        lengths = [chance.choice((1, 3, 49, 51, 120)) for _ in range(40)]
        groups = groups_of(CountingModel, lengths, 130)
        assert all(len(group) == 1 or sum(group) <= 130 for group in groups)
        for is_long in (False, True):
            own = [each for group in groups for each in group if (each > 50) == is_long]
            assert own == [each for each in lengths if (each > 50) == is_long]


def test_a_model_that_cannot_count_serves_without_cuts(caplog: pytest.LogCaptureFixture) -> None:
    assert groups_of(RaisingModel, [10, 20, 45], 15) == [[10, 20, 45]]
    assert [record.message for record in caplog.records] == [
        "num_tokens has raised: batches are not cut"
    ]
