"""Threads that prepare, in one process."""

import math
import threading

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.inside.preparing import Preparer, unprepared
from inferpool.workers.shared.messages import ItemRef

NUM_THREADS = 3


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
