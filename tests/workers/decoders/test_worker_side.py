import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inferpool.models.accelerator.device import HandOver, pin_in_place, pinned
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorHeader
from inferpool.models.vision.classifier import stacked
from inferpool.workers.decoders import worker_side
from inferpool.workers.decoders.connections import DecoderConnection, Decoding, MoreWork
from inferpool.workers.decoders.ring import DecoderReady, NewDecoder, RingRuns, SlotFilled, Unfit
from inferpool.workers.shared.config import ModelConfig, WorkerConfig
from inferpool.workers.shared.messages import ItemError
from tests.apart_model import ApartModel
from tests.descriptors import num_open
from tests.workers.decoders.acted_decoder import (
    DIGEST,
    TIMEOUT_S,
    ActedDecoder,
    ActedHost,
    acted_host,
    refs,
)


class DecodersClock:
    """The clock of `Decoders`, which stands still but when a test moves it on."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: int, host: ActedHost) -> None:
        """Let time pass, while the decoders looks on."""
        for _ in range(seconds):
            self.now += 1.0
            host.decoders.begin(refs(0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DecodersClock:
    clock = DecodersClock()
    monkeypatch.setattr(worker_side, "time", clock)
    return clock


@pytest.fixture
def host(clock: DecodersClock) -> Iterator[ActedHost]:
    with acted_host() as host:
        yield host


def begun(host: ActedHost, num: int) -> Decoding:
    decoding = host.decoders.begin(refs(num))
    assert decoding is not None
    return decoding


def values(decoding: Decoding) -> dict[int, object]:
    return {
        index: int(found["x"][0]) if isinstance(found, dict) else found
        for index, found in decoding.found.items()
    }


def test_decoder_prepares_a_batch_two_instances_at_a_time(host: ActedHost):
    decoder = host.hire()
    decoding = begun(host, 3)
    first = decoder.tasks()
    assert len(first) == 2
    for number, task in enumerate(first):
        decoder.fill(task, 10 + number)
    host.decoders.begin(refs(0))
    (last,) = decoder.tasks()
    decoder.say(Unfit(last.id))
    decoding.finish()
    assert values(decoding) == {0: 10, 1: 11, 2: None}
    features, outcomes = [None] * 3, [None] * 3
    assert decoding.store(features, outcomes) == [0, 1]
    assert decoding.others == [2]


def test_decoder_that_prepares_otherwise_than_the_worker_is_refused(host: ActedHost):
    decoder = host.hire(b"other")
    assert host.decoders.begin(refs(1)) is None
    assert decoder.process.wait(60) == -9


def header(dtype: str, *shape: int) -> TensorHeader:
    return TensorHeader("x", dtype, shape, 0)


NONSENSE: dict[str, bytes | TensorHeader | Unfit] = {
    "garbage": b"\0\0\0\4nope",
    "frame": b"\xff" * 32,
    "endless": (1 << 29).to_bytes(4, "big"),
    "unknown": Unfit(99),
    "outside": TensorHeader("x", "int64", (1,), 60),
    "odd": TensorHeader("x", "int64", (1,), 3),
    "no dtype": header("load", 1),
    "huge and empty": header("int64", (1 << 64) - 1, 0),
    "negative": header("int64", -1, -1),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_decoder_that_says_nonsense_is_killed_and_the_worker_does_its_tasks(
    host: ActedHost, kind: str
):
    decoder = host.hire()
    decoding = begun(host, 1)
    (task,) = decoder.tasks()
    match NONSENSE[kind]:
        case bytes(data):
            decoder.write(data)
        case TensorHeader() as placed:
            decoder.say(SlotFilled(task.id, (placed,)))
        case message:
            decoder.say(message)
    decoding.finish()
    assert values(decoding) == {0: None}
    assert decoder.process.wait(60) == -9


def test_decoder_that_answers_tasks_without_reading_them_cannot_block_the_worker(host: ActedHost):
    decoder = host.hire()
    decoding = begun(host, 1)
    (task,) = decoder.tasks()
    id = task.id
    while decoder.process.poll() is None:
        decoder.say(Unfit(id))
        decoding.finish()
        decoding.release()
        host.decoders.begin(refs(0))
        if (following := host.decoders.begin(refs(1))) is None:
            break
        decoding, id = following, id + 1
    assert id > 100
    decoding.finish()
    assert decoder.process.wait(60) == -9


def test_decoders_whose_ring_did_not_arrive_are_not_used():
    with acted_host(has_ring=False) as host:
        host.hire()
        assert host.decoders.begin(refs(1)) is None
        assert host.decoders.num_ready == 0


def test_only_the_task_that_a_dead_decoder_had_begun_is_held_against_its_input(
    host: ActedHost, clock: DecodersClock
):
    decoding = None
    for _ in range(2):
        decoder = host.hire()
        if decoding is None:
            decoding = begun(host, 2)
        first = decoder.tasks()[0]
        decoder.begin(first)
        decoder.die()
        host.decoders.begin(refs(0))
    assert decoding is not None
    clock.pass_by(4, host)
    assert not decoding.is_done  # it waits for another decoder
    clock.pass_by(2, host)
    decoding.finish()
    poison = decoding.found[0]
    assert isinstance(poison, ItemError)
    assert poison.code == "worker_crashed"
    assert decoding.found[1] is None


def test_batches_wait_for_a_decoder_if_inputs_have_killed_the_last(host: ActedHost):
    decoder = host.hire()
    first = begun(host, 1)
    decoder.begin(decoder.tasks()[0])
    decoder.die()
    following = begun(host, 1)
    decoder = host.hire()
    for number, task in enumerate(decoder.tasks()):
        decoder.fill(task, number)
    first.finish()
    following.finish()
    assert [values(first), values(following)] == [{0: 0}, {0: 1}]


@pytest.mark.parametrize("said", [0, (1 << 64) - 1])
def test_an_input_whose_decoders_die_is_given_up_whatever_they_say_about_it(
    host: ActedHost, said: int
):
    decoder = host.hire()
    decoding = begun(host, 2)
    for _ in range(20):
        decoder.tasks()
        decoder.say_begun(said)
        following = host.hire()
        decoder.die()
        host.decoders.begin(refs(0))
        decoder = following
        if decoding.found:
            break
    for task in decoder.tasks():
        decoder.fill(task, 7)
    decoding.finish()
    poison = decoding.found[0]
    assert isinstance(poison, ItemError)
    assert poison.code == "worker_crashed"
    assert values(decoding)[1] == 7


def test_a_decoder_that_reports_its_start_again_is_killed(host: ActedHost):
    decoder = host.hire()
    decoder.say(DecoderReady(DIGEST))
    host.decoders.begin(refs(0))
    assert decoder.process.wait(60) == -9


def test_a_pause_of_the_whole_host_kills_no_decoder(clock: DecodersClock, host: ActedHost):
    decoder = host.hire()
    decoding = begun(host, 1)
    (task,) = decoder.tasks()
    decoder.begin(task)
    for _ in range(3):
        clock.now += 2 * TIMEOUT_S
        host.decoders.begin(refs(0))
    assert decoder.process.poll() is None
    decoder.fill(task, 5)
    decoding.finish()
    assert values(decoding) == {0: 5}


def test_a_decoder_that_hangs_while_the_worker_looks_on_is_killed(
    clock: DecodersClock, host: ActedHost
):
    decoder = host.hire()
    begun(host, 1)
    clock.pass_by(int(TIMEOUT_S), host)
    assert decoder.process.poll() is None
    clock.pass_by(1, host)
    assert decoder.process.wait(60) == -9


def test_a_decoder_that_does_not_exit_when_it_is_killed_loses_its_slots_and_holds_up_nobody(
    clock: DecodersClock, host: ActedHost, monkeypatch: pytest.MonkeyPatch
):
    def be_stuck(decoder: DecoderConnection) -> None:
        decoder.killed_at = clock.now

    monkeypatch.setattr(DecoderConnection, "kill", be_stuck)
    host.hire()
    decoding = begun(host, 1)
    clock.pass_by(int(TIMEOUT_S) + 1, host)
    clock.pass_by(5, host)
    assert not decoding.is_done
    clock.pass_by(1, host)
    assert values(decoding) == {0: None}
    decoding.release()
    host.hire()
    assert host.decoders.begin(refs(4)) is None  # the other may still write
    assert host.decoders.begin(refs(3)) is not None


def test_instances_with_a_deadline_that_has_passed_go_to_no_decoder(
    clock: DecodersClock, host: ActedHost
):
    decoder = host.hire()
    decoding = host.decoders.begin([*refs(3), *refs(1, clock.now + 1000)])
    assert decoding is not None
    first = decoder.tasks()
    clock.now += 1000
    for number, task in enumerate(first):
        decoder.fill(task, number)
    host.decoders.begin(refs(0))
    (third,) = decoder.tasks()
    decoder.fill(third, 2)
    decoding.finish()
    assert values(decoding) == {0: 0, 1: 1, 2: 2, 3: None}


def test_an_instance_whose_deadline_passes_at_a_decoder_keeps_its_slot_until_the_answer(
    clock: DecodersClock, host: ActedHost
):
    decoder = host.hire()
    decoding = host.decoders.begin(refs(4, clock.now + 1000))
    assert decoding is not None
    first = decoder.tasks()
    clock.now += 1000
    host.decoders.begin(refs(0))
    assert values(decoding) == {2: None, 3: None}
    decoding.release()
    assert host.decoders.begin(refs(1)) is None  # a decoder may still write to its slots
    for task in first:
        decoder.fill(task, 1)
    host.decoders.begin(refs(0))
    assert values(decoding) == {0: 1, 1: 1, 2: None, 3: None}
    assert host.decoders.begin(refs(4)) is not None


def test_slots_are_used_again_after_the_answer_and_the_exit_of_who_may_write(host: ActedHost):
    decoder = host.hire()
    decoding = begun(host, 3)
    decoding.release()
    assert host.decoders.begin(refs(3)) is None
    decoder.die()
    assert host.decoders.begin(refs(3)) is None  # its exit is seen here, and no decoder is left
    host.hire()
    assert begun(host, 3).run == decoding.run


def test_a_decoder_that_has_not_reported_its_start_gets_no_task(host: ActedHost):
    decoder = ActedDecoder(host, 0)
    host.acted.append(decoder)
    host.decoders.begin(refs(0))
    assert host.decoders.begin(refs(1)) is None
    assert not decoder.tasks()


def test_a_decoder_whose_descriptors_did_not_all_arrive_is_not_used(
    host: ActedHost, caplog: pytest.LogCaptureFixture
):
    host.decoders.begin(refs(0))  # it takes in the ring
    reader, writer = os.pipe()
    before = num_open()
    host.tell(NewDecoder(0, 1), [reader, writer])
    host.decoders.begin(refs(0))
    assert "too few descriptors" in caplog.text
    assert num_open() == before
    os.close(reader)
    os.close(writer)
    decoder = host.hire()
    decoding = begun(host, 1)
    decoder.fill(decoder.tasks()[0], 3)
    decoding.finish()
    assert values(decoding) == {0: 3}


class LargeApart(ApartModel):
    def preprocess(self, item: Item) -> Features:
        return {**super().preprocess(item), "pad": torch.zeros(1 << 19)}


@pytest.mark.parametrize(
    ("model", "device", "changes", "num_slots"),
    [
        (ApartModel, "cpu", {"may_batches_grow": True}, 4 * 64),
        (ApartModel, "cuda:0", {"may_batches_grow": True}, 4 * 256),
        (ApartModel, "cuda:0", {}, 4 * 64),
        (ApartModel, "cpu", {"max_batch_size": 1000}, 4 * 1000),
        (LargeApart, "cuda:0", {"may_batches_grow": True}, 511),  # all that fits into the ring
    ],
)
def test_ring_has_slots_for_all_batches_that_may_come_if_they_are_not_too_many(
    model: type[ApartModel], device: str, changes: dict[str, Any], num_slots: int
):
    config = WorkerConfig(
        model=ModelConfig(name="m", source="tests"),
        placement=Placement(devices=(device,)),
        decoders=1,
        **changes,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = worker_side.decoders_for(config, model(), theirs, lambda: None)
        assert found is not None
        assert found.plan.num_slots == num_slots


def test_batch_without_enough_slots_waits_for_them_and_is_prepared_in_part_if_need_be(
    host: ActedHost,
):
    decoder = host.hire()
    first = begun(host, 3)
    assert host.decoders.begin(refs(6)) is None
    part = host.decoders.begin(refs(6), True)
    assert part is not None
    assert (part.run, part.others) == (range(3, 4), [1, 2, 3, 4, 5])
    for decoding in (first, part):
        while not decoding.is_done:
            for task in decoder.tasks():
                decoder.fill(task, task.slot)
            host.decoders.begin(refs(0))
        decoding.finish()
        decoding.release()
    assert (values(first), values(part)) == ({0: 0, 1: 1, 2: 2}, {0: 3})
    assert host.decoders.begin(refs(6), True).run == range(4)  # type: ignore[union-attr]


def test_runs_of_slots_go_round_and_never_overlap():
    runs = RingRuns(10)
    first, second = runs.take(4), runs.take(4)
    assert (first, second) == (range(4), range(4, 8))
    assert runs.take(4) is None
    assert first is not None
    runs.free(first)
    assert runs.take(3) == range(3)
    assert runs.take(3) is None
    assert runs.take(1) == range(3, 4)
    assert runs.take(2) is None  # only after the newest, and from the start
    runs.free(range(3))
    assert runs.take(8, or_less=True) == range(3)
    assert runs.take(8, or_less=True) is None


@pytest.mark.simulated
def test_slots_are_used_again_only_when_the_device_has_copied_them(host: ActedHost):
    device = torch.device("sim:0")
    torch.ones(1, device=device)
    torch.ones(1).pin_memory()  # before this, torch asks no device of this kind what is pinned
    decoder = host.hire()
    (ring,) = host.rings
    assert pin_in_place(ring, device)
    decoding = begun(host, 4)
    host.decoders.begin(refs(0))
    given = 0
    while given < 4:
        for task in decoder.tasks():
            decoder.fill(task, 100 + given)
            given += 1
        host.decoders.begin(refs(0))
    decoding.finish()
    batch = stacked([decoding.found[i]["x"].view(torch.uint8) for i in range(4)], torch.stack)  # type: ignore[index, call-overload]
    assert batch.shape == (4, 64)
    assert pinned(batch).data_ptr() == batch.data_ptr()
    with torch.sim.held():
        copied = ring.to(device, non_blocking=True)
        decoding.release([HandOver(torch.sim.current_stream()).is_over])
        assert host.decoders.begin(refs(4)) is None
    torch.sim.synchronize()
    assert torch.equal(copied.cpu(), ring)
    assert begun(host, 4).run == decoding.run


def test_next_batch_begins_while_a_decoder_has_room(host: ActedHost):
    decoder = host.hire()
    decoding = begun(host, 1)
    (task,) = decoder.tasks()
    asked = []

    def begin() -> bool:
        asked.append(task)
        decoder.fill(task, 7)
        return False

    with socket.socket() as inbox:
        decoding.finish(MoreWork(inbox.fileno(), begin))
    assert asked == [task]
