"""Batches bounded by an estimate of their tokens: which texts share one, and that none is lost."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inferpool.models.spec import USUAL_INTERFACE, TextFacts
from inferpool.service.parts.token_bound import TokenBound, add_token_bound, cost_of
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.instance import BACKGROUND
from inferpool.service.queue.scheduling.lanes import BatchCosts, Lane
from inferpool.service.settings.model import ModelSettings
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeWorker, ref_to
from tests.service.pools import make_dispatcher, until

pytestmark = pytest.mark.usefixtures("virtual_time")

FACTS = TextFacts(task="embedding", max_tokens=512, vocab_size=1000)
SHORT, LONG = 8, 4096
"""Bytes of texts that cost 4 and 512 tokens."""


def bounded(
    arena: Arena, most: int, *, size: int = 64, text: TextFacts | None = FACTS
) -> Dispatcher:
    dispatcher = make_dispatcher(arena, max_batch_size=size, max_queue_length=1000)
    version: Any = SimpleNamespace(interface=msgspec.structs.replace(USUAL_INTERFACE, text=text))
    dispatcher.scheduler.policies.append(TokenBound(most, version))
    return dispatcher


def submit(dispatcher: Dispatcher, num_bytes: int, **fields: Any) -> Any:
    payload = b"x" * num_bytes
    ref = ref_to(payload)
    for name, value in fields.items():
        setattr(ref, name, value)
    return dispatcher.submit(ref, [payload])


async def batches_of(worker: FakeWorker, num: int) -> list[list[int]]:
    """Answer all batches until some instances are answered; return the bytes of each."""
    found: list[list[int]] = []
    while sum(map(len, found)) < num:
        await until(lambda: worker.batches)
        found.append([item.num_bytes for item in worker.batches[0][0]])
        worker.answer()
    return found


def test_a_text_costs_a_quarter_of_its_bytes_and_no_more_than_the_model_reads():
    assert [cost_of(num, FACTS) for num in (0, SHORT, 2000, LONG)] == [2, 4, 502, 512]


@pytest.mark.parametrize(
    ("settings", "num_policies", "size"),
    [
        ({}, 0, 8),
        ({"max_batch_tokens": 64}, 1, 256),
        ({"max_batch_tokens": 64, "max_batch_size": 4}, 1, 4),
    ],
)
async def test_the_setting_bounds_tokens_and_frees_the_number_of_texts(
    arena: Arena, settings: dict[str, int], num_policies: int, size: int
) -> None:
    model = ModelSettings(source="minilm_l6", **settings)  # type: ignore[arg-type]
    fixed = None if model.max_batch_size == "auto" else model.max_batch_size
    dispatcher = make_dispatcher(arena, max_batch_size=fixed)  # type: ignore[arg-type]
    version: Any = SimpleNamespace(settings=model, pool=SimpleNamespace(dispatcher=dispatcher))
    add_token_bound(version)
    assert (len(dispatcher.scheduler.policies), dispatcher.max_batch_size) == (num_policies, size)


async def test_short_texts_share_a_batch_with_one_long_text_at_most(arena: Arena) -> None:
    dispatcher, worker = bounded(arena, 600), FakeWorker()
    dispatcher.attach(worker)
    sent = [SHORT, SHORT, LONG, SHORT, LONG, SHORT, SHORT]
    for each in sent:
        submit(dispatcher, each)
    assert await batches_of(worker, len(sent)) == [sent[:4], sent[4:]]


async def test_a_text_above_the_bound_goes_alone(arena: Arena) -> None:
    dispatcher, worker = bounded(arena, 100), FakeWorker()
    dispatcher.attach(worker)
    for each in (LONG, SHORT, LONG, LONG):
        submit(dispatcher, each)
    assert await batches_of(worker, 4) == [[LONG], [SHORT], [LONG], [LONG]]


async def test_instances_of_a_model_of_something_else_are_not_bounded(arena: Arena) -> None:
    dispatcher, worker = bounded(arena, 100, text=None), FakeWorker()
    dispatcher.attach(worker)
    for _ in range(3):
        submit(dispatcher, LONG)
    assert await batches_of(worker, 3) == [[LONG] * 3]


async def test_a_busy_worker_gets_a_batch_that_is_full_of_tokens_at_once(arena: Arena) -> None:
    dispatcher, worker = bounded(arena, 600), FakeWorker()
    dispatcher.attach(worker)
    submit(dispatcher, SHORT)
    await until(lambda: worker.batches)
    submit(dispatcher, LONG)
    submit(dispatcher, SHORT)
    await until(lambda: not dispatcher.scheduler.is_due)
    assert worker.sizes == [1]  # there is room for more
    submit(dispatcher, LONG)
    await until(lambda: not dispatcher.scheduler.is_due)
    assert worker.sizes == [1, 2]


async def test_a_slow_worker_gets_no_more_from_the_end_of_the_queue(arena: Arena) -> None:
    dispatcher = bounded(arena, 600)
    for each in (SHORT, LONG, LONG, SHORT):
        submit(dispatcher, each)
    lane = Lane(FakeWorker(), BatchCosts())
    batch = dispatcher.scheduler._filler.fill_from_end(lane, 8, 0.0, 1e9)
    assert [each.ref.num_bytes for each in batch] == [SHORT, LONG, SHORT]
    assert dispatcher.num_queued == 1


@pytest.mark.parametrize(("most", "size"), [(8, 8), (40, 64), (100, 64), (100, 8)])
async def test_each_text_comes_once_in_order_and_no_batch_is_above_the_bound(
    most: int, size: int
) -> None:
    arena, worker, chance = Arena(1 << 20), FakeWorker(), random.Random(36)
    dispatcher = bounded(arena, most, size=size)
    dispatcher.attach(worker)
    futures = []
    for number in range(50):
        priority = chance.choice((5, 5, 7, BACKGROUND))
        num_bytes = chance.choice((chance.randint(1, 60), chance.randint(1, 250)))
        caller = -chance.randint(1, 3) if priority == BACKGROUND else 0
        fields = {"priority": priority, "caller": caller, "request_id": f"{number}"}
        futures.append(submit(dispatcher, num_bytes, **fields))
    seen: list[tuple[tuple[int, int], int]] = []
    while len(seen) < len(futures):
        await until(lambda: worker.batches)
        items = worker.batches[0][0]
        assert len(items) == 1 or sum(cost_of(i.num_bytes, FACTS) for i in items) <= most
        seen += (((i.priority, i.caller), int(i.request_id)) for i in items)
        worker.answer()
    assert sorted(number for _, number in seen) == list(range(len(futures)))
    for kind in {kind for kind, _ in seen}:
        own = [number for other, number in seen if other == kind]
        assert own == sorted(own)
    await until(lambda: all(future.done() for future in futures))
    assert dispatcher.num_unsettled == 0
    arena.close()
