"""Preparation of batches in one process: its threads, and the groups that are computed together."""

import logging
import math
import threading
from collections.abc import Hashable, Iterator, Sequence

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Preparer, grouped, unprepared
from inferpool.workers.shared.messages import ItemRef
from tests.workers.inside.test_compute import compute

NUM_THREADS = 3


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class LookingModel(Model):
    """Notes how many OpenMP threads each thread has that prepares for it."""

    outputs = (TensorSpec(name="x", dtype="float32", shape=(-1,)),)

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.together = threading.Barrier(1)

    def preprocess(self, item: Item) -> Features:
        self.together.wait(60)
        name = threading.current_thread().name.partition("_")[0]
        self.found[name] = torch.get_num_threads()
        return {"x": torch.zeros(1)}

    def forward(self, batch: Features) -> Features:
        return batch


@pytest.mark.usefixtures("eight_openmp_threads")
def test_threads_that_prepare_share_the_openmp_threads_of_the_worker():
    model = LookingModel()
    preparer = Preparer(
        model, num_threads=NUM_THREADS, staging=None, error_detail="name", pool_pays_s=0.0
    )
    refs = [ItemRef("bytes", 0, 0, math.inf, request_id=str(n)) for n in range(NUM_THREADS)]
    with started_pool(1, "receive") as receiving:  # later than those that prepare, as in a worker
        for num_at_once in (1, NUM_THREADS):
            model.together = threading.Barrier(num_at_once)
            batch = unprepared(1, refs, [memoryview(b"")] * NUM_THREADS)
            prepared = receiving.submit(torch.inference_mode()(preparer.prepare), batch).result()
            assert prepared.outcomes == [None] * NUM_THREADS
    assert model.found == {"receive": 8, "prepare": 2}
    assert torch.get_num_threads() == 8


class SummingModel(Model):
    """Sums lists of any length; keeps the shapes of its batches."""

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        dtype = torch.int64 if isinstance(value, int) else torch.float32
        return {"scalar" if isinstance(value, int) else "x": torch.tensor(value, dtype=dtype)}

    def forward(self, batch: Features) -> Features:
        (x,) = batch.values()
        self.shapes.append(list(x.shape))
        if (x == 13).any():
            raise ValueError("thirteen")
        return {"y": x.reshape(len(x), -1).sum(1)}


def test_instances_of_several_shapes_and_names_are_computed_shape_by_shape_in_order(
    caplog: pytest.LogCaptureFixture,
):
    model = SummingModel()
    with caplog.at_level(logging.INFO):
        assert compute(model, [[1, 2], 5, [1, 2, 3], [3, 4], 6, [4, 5, 6]]) == [3, 5, 6, 7, 6, 15]
    assert model.shapes == [[2, 2], [2, 3], [2]]
    assert not caplog.records


def test_failure_of_one_group_does_not_touch_the_others(caplog: pytest.LogCaptureFixture):
    model = SummingModel()
    assert compute(model, [[1, 2], [13, 0, 0], [3, 4], [1, 1, 1]]) == [3, "model_error", 7, 3]
    assert model.shapes == [[2, 2], [2, 3], [1, 3], [1, 3]]


def test_an_input_that_collate_refuses_does_not_part_the_others(caplog: pytest.LogCaptureFixture):
    class Decoding(SummingModel):
        """Decodes in `collate`: inputs have different lengths, and batches one shape."""

        def collate(self, instances: Sequence[Features]) -> Features:
            if any(13 in each["x"] for each in instances):
                raise InputError("thirteen")
            return {"x": torch.stack([each["x"].sum()[None] for each in instances])}

    model = Decoding()
    values = [[1] * length for length in range(1, 9)]
    values[2] = [13]
    assert compute(model, values) == [1, 2, "invalid_input", 4, 5, 6, 7, 8]
    assert model.shapes == [[2, 1], [1, 1], [4, 1]]
    assert not caplog.records


def test_instances_that_the_model_pads_stay_together():
    class Padded(SummingModel):
        def collate(self, instances: Sequence[Features]) -> Features:
            if any("x" not in each for each in instances):
                return super().collate(instances)
            rows = [each["x"] for each in instances]
            return {"x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    model = Padded()
    assert compute(model, [[1, 2], 5, [1, 2, 3]]) == [3, 5, 6]
    assert model.shapes == [[2, 3], [1]]


def test_instances_are_computed_bucket_by_bucket_and_one_without_a_bucket_fails_alone():
    class Bucketed(SummingModel):
        def bucket(self, features: Features) -> Hashable:
            length = len(features["x"])
            return [length] if length > 4 else length > 2

        def collate(self, instances: Sequence[Features]) -> Features:
            rows = [each["x"] for each in instances]
            return {"x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    model = Bucketed()
    values = [[1, 2, 3], [1], [1, 1, 1, 1, 1], [1, 2, 3, 4], [5, 6], [7]]
    assert compute(model, values) == [6, 1, "model_error", 10, 11, 7]
    assert model.shapes == [[2, 4], [3, 2]]


def test_dtypes_are_not_mixed():
    features = [
        {"x": torch.ones(2)},
        {"x": torch.ones(2, dtype=torch.int64)},
        {"x": torch.ones(2), "more": torch.ones(1)},
        {"x": torch.zeros(2)},
    ]
    groups = grouped(
        [0, 1, 2, 3],
        features,
        [None] * 4,
        lambda indices: Model().collate([features[i] for i in indices]),
    )
    assert [group.indices for group in groups] == [[0, 3], [1], [2]]
    assert all(group.batch is not None for group in groups)


def test_instances_that_cannot_be_collated_are_computed_apart():
    def refuse(indices: Sequence[int]) -> Features:
        raise ValueError

    same = [{"x": torch.ones(2)}] * 3
    assert [group.indices for group in grouped([0, 1, 2], same, [None] * 3, refuse)] == [[0, 1, 2]]
    odd: list[object] = [None, {"x": 3}, {"x": torch.ones(2)}]
    groups = grouped([0, 1, 2], odd, [None] * 3, refuse)  # type: ignore[arg-type]  # a user's mistake
    assert len(groups) == 3


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_batch_that_does_not_fit_into_memory_is_halved(layout: torch.layout):
    class Nested(SummingModel):
        def collate(self, instances: Sequence[Features]) -> Features:
            return {
                "x": torch.nested.nested_tensor([each["x"] for each in instances], layout=layout)
            }

        def forward(self, batch: Features) -> Features:
            rows = batch["x"].unbind()
            if len(rows) > 1:
                raise torch.OutOfMemoryError("too much")
            return {"y": torch.stack([row.sum() for row in rows])}

    assert compute(Nested(), [[1.0], [2.0, 3.0], [4.0]]) == [1.0, 5.0, 4.0]
