"""The loop that has several batches under way, in a thread; the device is the simulated one."""

import gc
import json
import math
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from inferpool.workers.inside.ahead import AheadLoop
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.process import BatchReceiver
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import Batch, BatchDone, ItemError, ItemRef
from tests.ahead_model import AheadModel
from tests.e2e.running import until

pytestmark = pytest.mark.simulated

DEVICE = "sim:0"
WAIT_S = 60.0


class Watched(AheadModel):
    """Takes long enough on its device for batches to overlap, and says who prepares on what."""

    can_run_ahead = True

    def __init__(self) -> None:
        super().__init__(busy_us=3000)
        self.prepared: list[tuple[str, int, list[str]]] = []
        """Thread, stream and acts of each batch that was collated."""
        self.preprocessed_on: list[int] = []
        self.features: list[weakref.ref[torch.Tensor]] = []
        self.meeting = threading.Barrier(2)

    def preprocess(self, item: Item) -> Features:
        features = super().preprocess(item)
        self.features.append(weakref.ref(features["x"]))
        self.preprocessed_on.append(torch.sim.current_stream().stream_id)
        if features["do"] == "meet":  # type: ignore[comparison-overlap]  # it is a text
            self.meeting.wait(WAIT_S)
        return features

    def bucket(self, features: Features) -> bool:
        return features["do"] == "no room"  # type: ignore[comparison-overlap]  # it is a text

    def collate(self, instances: Sequence[Features]) -> Features:
        batch = super().collate(instances)
        name = threading.current_thread().name
        self.prepared.append((name, torch.sim.current_stream().stream_id, [*batch["do"]]))  # type: ignore[arg-type]
        return batch

    def forward(self, batch: Features) -> Features:
        found = super().forward(batch)
        if "no room" in [*batch["do"]] and self.sizes.count(len(batch["do"])) == 1:
            raise torch.OutOfMemoryError("no room beside another batch")
        return found

    @property
    def sizes(self) -> list[int]:
        """Sizes of the batches that were launched, or computed."""
        return [size for name, size in self.steps if name == "forward"]


class LoopInThread:
    """A loop with queues of this process, whose batches and answers a test sees."""

    def __init__(self, num_threads: int = 1) -> None:
        self.model = Watched()
        with torch.inference_mode():
            self.model.load(Placement(devices=(DEVICE,)))
            self.computer = Computer(self.model, num_threads=num_threads, device=DEVICE)
        self._orders: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._payloads = bytearray(1 << 16)
        self._end = 0
        self.answers: list[tuple[int, list[object]]] = []
        """Ids and answers of batches, in the order in which they are answered."""
        self.row = mmap.mmap(-1, mmap.PAGESIZE)
        """The heartbeat, which begins with the time of the last beat."""
        heartbeat = Heartbeat(self.row)
        self._taking = threading.Lock()
        inbox: Any = SimpleNamespace(get=self._get, wait=self._has_more)
        receiver = BatchReceiver(self.computer, inbox, memoryview(self._payloads), heartbeat)
        outbox, outputs = SimpleNamespace(put=self._answered), SimpleNamespace(num_stored=0)
        self._loop = AheadLoop(self.computer, receiver, outbox, heartbeat, outputs)
        self.thread = threading.Thread(target=self._loop.serve, daemon=True)
        self.thread.start()

    def give(self, id: int, acts: Mapping[int, str]) -> None:
        """Send a batch: acts by numbers."""
        items = []
        for number, act in acts.items():
            body = json.dumps({"n": number, "do": act}).encode()
            self._payloads[self._end : self._end + len(body)] = body
            items.append(ItemRef("json", self._end, len(body), math.inf))
            self._end += len(body)
        self._orders.put(Batch(id, items))

    def end(self) -> None:
        """Send the sentinel."""
        self._orders.put(None)

    def wait_for(self, num: int) -> None:
        """Wait for a number of answers."""
        until(lambda: len(self.answers) >= num, WAIT_S)

    def _get(self) -> Batch | None:
        assert self._taking.acquire(blocking=False), "two threads read one queue"
        try:
            return self._orders.get()
        finally:
            self._taking.release()

    def _has_more(self, timeout_s: float) -> bool:
        threading.Event().wait(0.001 if self._orders.empty() else 0)
        return not self._orders.empty()

    def _answered(self, done: BatchDone) -> None:
        found = [
            each.code if isinstance(each, ItemError) else json.loads(each)["twice"]  # type: ignore[arg-type]
            for each in done.outcomes
        ]
        self.answers.append((done.id, found))


@pytest.fixture
def loop() -> Iterator[LoopInThread]:
    """Start a loop that overlaps already, and end it."""
    started = LoopInThread()
    started.give(0, {0: "ok"})
    started.wait_for(1)
    yield started
    started.end()
    started.thread.join(WAIT_S)
    assert not started.thread.is_alive()
    torch.sim.revive()


def test_two_batches_are_launched_and_two_prepared_while_the_device_computes(loop: LoopInThread):
    with torch.sim.held():
        for id in (1, 2, 3, 4):
            loop.give(id, {10 * id + i: "ok" for i in range(id)})
        until(lambda: len(loop.model.prepared) == 5)
        until(lambda: len(loop.model.sizes) == 3)
        assert loop.answers == [(0, [0])]
    loop.wait_for(5)
    assert loop.model.sizes == [1, 1, 2, 3, 4]
    assert loop.answers[1:] == [(id, [2 * (10 * id + i) for i in range(id)]) for id in (1, 2, 3, 4)]


def test_batches_are_prepared_at_once_on_streams_of_their_own_and_answered_in_order(
    loop: LoopInThread,
):
    with torch.sim.held():
        loop.give(1, {1: "ok"})
        until(lambda: len(loop.model.sizes) == 2)
        loop.give(2, {2: "meet"})  # each waits for the other
        loop.give(3, {3: "meet"})
        until(lambda: len(loop.model.prepared) == 4)
    loop.wait_for(4)
    assert loop.answers == [(0, [0]), (1, [2]), (2, [4]), (3, [6])]
    threads, streams, acts = zip(*loop.model.prepared[2:], strict=True)
    assert acts == (["meet"], ["meet"])
    assert len({*threads}) == len({*streams}) == 2
    assert torch.sim.default_stream().stream_id not in streams


def test_batch_that_fails_among_others_is_computed_anew_in_its_turn(loop: LoopInThread):
    with torch.sim.held():
        loop.give(1, {1: "ok"})
        loop.give(2, {2: "ok", 3: "raise", 4: "ok", 5: "ok"})
        loop.give(3, dict.fromkeys(range(6, 12), "ok"))
        loop.give(4, {12: "nan", 13: "ok"})
        until(lambda: len(loop.model.prepared) == 5)
        until(lambda: len(loop.model.sizes) == 3)
    loop.wait_for(5)
    assert loop.answers[1:] == [
        (1, [2]),
        (2, [4, "model_error", 8, 10]),
        (3, [*range(12, 24, 2)]),
        (4, ["non_finite_output", 26]),
    ]
    # Nothing is launched while a batch that failed is still to be computed.
    assert loop.model.sizes == [1, 1, 4, 4, 2, 1, 1, 2, 6, 2]


def test_batch_that_finds_no_memory_beside_another_limits_no_later_one(loop: LoopInThread):
    with torch.sim.held():
        loop.give(1, {1: "ok"})
        loop.give(2, {2: "no room", 3: "no room", 4: "no room"})
        loop.give(3, {5: "ok", 6: "ok"})
        until(lambda: len(loop.model.prepared) == 4)
        until(lambda: len(loop.model.sizes) == 3)
    loop.wait_for(4)
    assert loop.answers[1:] == [(1, [2]), (2, [4, 6, 8]), (3, [10, 12])]
    assert loop.model.sizes == [1, 1, 3, 3, 2]


def test_nothing_is_launched_behind_a_batch_of_which_a_part_failed(loop: LoopInThread):
    with torch.sim.held():
        loop.give(1, {1: "ok", 2: "no room", 3: "no room", 4: "no room"})
        loop.give(2, {5: "ok", 6: "ok"})
        until(lambda: len(loop.model.prepared) == 4)
        time.sleep(0.05)  # it would be launched by now
    loop.wait_for(3)
    assert loop.answers[1:] == [(1, [2, 4, 6, 8]), (2, [10, 12])]
    assert loop.model.sizes == [1, 1, 3, 3, 2]


def test_sentinel_is_obeyed_after_all_that_is_under_way(loop: LoopInThread):
    with torch.sim.held():
        for id in (1, 2, 3, 4):
            loop.give(id, {id: "ok"})
        loop.end()
        until(lambda: len(loop.model.prepared) == 5)
        assert loop.thread.is_alive()
    loop.thread.join(WAIT_S)
    assert loop.answers[1:] == [(id, [2 * id]) for id in (1, 2, 3, 4)]
    gc.collect()
    assert [each() for each in loop.model.features] == [None] * 5


def test_loop_that_waits_for_work_beats_and_holds_no_batch(loop: LoopInThread):
    for id in (1, 2, 3):
        loop.give(id, {id: "ok"})
    loop.wait_for(4)
    last_beat = loop.row[:8]
    until(lambda: loop.row[:8] != last_beat)
    until(lambda: {each() for each in loop.model.features} == {None})


def test_what_threads_put_on_the_device_is_handed_over_with_their_batch():
    loop = LoopInThread(num_threads=2)
    loop.computer.preparer._pool_pays_s = -1.0
    for id in (0, 1, 2):
        loop.give(id, {id: "ok", id + 10: "ok"})
        loop.wait_for(id + 1)
    loop.end()
    loop.thread.join(WAIT_S)
    streams = [stream for _, stream, _ in loop.model.prepared]
    assert loop.model.preprocessed_on == [stream for stream in streams for _ in range(2)]
