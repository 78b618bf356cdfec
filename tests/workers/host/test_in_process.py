"""The engine of `inferpool serve --debug`: its model behaves as in a worker."""

import asyncio
import gc
import math
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.in_process import InProcessEngine, InProcessWorker
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import ItemRef
from tests.workers.contract import config_of

_PAYLOAD = b"[1.0,2.0]"


class Trained(Model):
    """Trains as it is loaded, and answers with a gradient."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),)

    def load(self, placement: Placement) -> None:
        self.net = torch.nn.Linear(2, 1, bias=False)
        self.net(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            self.net.weight.fill_(3.0)

    def forward(self, batch: Features) -> Features:
        assert torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            self.net(x).sum().backward()
            assert x.grad is not None
            return {"y": x.grad}


class OutOfItems(Model):
    def load(self, placement: Placement) -> None:
        next(iter([]))


class LeavesCycle(Model):
    """Leaves an object as it is loaded that only a collection frees."""

    left: weakref.ref[Model]

    def load(self, placement: Placement) -> None:
        one = OutOfItems()
        vars(one)["itself"] = one
        LeavesCycle.left = weakref.ref(one)

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"]}

    def encoded_samples(self) -> Sequence[Item]:
        raise RuntimeError("nobody has asked for other decoders")


class Cancels(Model):
    def load(self, placement: Placement) -> None:
        raise asyncio.CancelledError


async def started(kind: type[Model]) -> InProcessWorker:
    config = config_of(f"{__name__}:{kind.__name__}")
    arena: Any = SimpleNamespace(memory=SimpleNamespace(map=bytearray(_PAYLOAD)))
    async with asyncio.timeout(60):
        return await InProcessEngine(arena).start(WorkerId(model="m", slot=0), config, print)


def test_what_a_load_has_left_is_freed_before_service():
    gc.disable()
    try:
        asyncio.run(started(LeavesCycle))
        assert LeavesCycle.left() is None
    finally:
        gc.enable()


def test_model_loads_outside_of_inference_mode_and_computes_in_it():
    async def ask() -> object:
        worker = await started(Trained)
        done = await worker.run([ItemRef("json", 0, len(_PAYLOAD), math.inf)])
        await worker.stop(1)
        return done.outcomes

    assert asyncio.run(ask()) == [b"[3.0,3.0]"]


@pytest.mark.parametrize(("kind", "told"), [(OutOfItems, "StopIteration"), (Cancels, "Cancelled")])
def test_errors_that_a_future_cannot_hold_end_the_start(kind: type[Model], told: str):
    with pytest.raises(WorkerStartError, match=f"the model raised {told}"):
        asyncio.run(started(kind))


def test_its_thread_ends_when_it_is_stopped():
    async def stopped() -> InProcessWorker:
        worker = await started(Trained)
        await worker.stop(1)
        return worker

    thread = asyncio.run(stopped())._thread
    thread.join(60)
    assert not thread.is_alive()
