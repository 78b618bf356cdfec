"""Work in the background takes what is idle, and others wait for one of its batches at most."""

import pytest

from inferpool.service.errors import OverloadedError, UnavailableError
from inferpool.service.queue.instance import BACKGROUND
from inferpool.workers.arena import Arena
from inferpool.workers.messages import ItemRef
from tests.fakes import FakeWorker, ref_to
from tests.service.pools import make_dispatcher, until


def background(payload: bytes = b"jjj") -> tuple[ItemRef, list[bytes]]:
    return ref_to(payload, priority=BACKGROUND), [payload]


async def test_an_idle_worker_takes_one_batch_of_it(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena, max_queue_length=3), FakeWorker()
    dispatcher.attach(worker)
    futures = [dispatcher.submit(*background()) for _ in range(10)]  # more than may queue
    await until(lambda: worker.batches)
    assert worker.sizes == [4]
    assert (dispatcher.num_queued, dispatcher.num_background) == (0, 6)
    for _ in range(3):
        await until(lambda: worker.batches)
        assert len(worker.batches) == 1
        worker.answer()
    await until(lambda: all(future.done() for future in futures))
    assert dispatcher.num_unsettled == 0


async def test_others_go_first(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)
    for _ in range(10):
        dispatcher.submit(*background())
    await until(lambda: worker.batches)
    others = [dispatcher.submit(ref_to(b"x"), [b"x"]) for _ in range(5)]
    worker.answer()
    await until(lambda: worker.batches)
    sizes = [[item.num_bytes for item in items] for items, _ in worker.batches]
    assert sizes[0] == [1] * 4
    worker.answer()
    await until(lambda: all(f.done() for f in others[:4]))
    while not others[4].done():
        await until(lambda: worker.batches)
        assert [item.num_bytes for item in worker.batches[0][0]] == [1]
        worker.answer()
        await until(lambda: others[4].done())
    await until(lambda: worker.batches)
    assert [item.num_bytes for item in worker.batches[0][0]] == [3] * 4


async def test_what_a_lost_worker_had_is_computed_again(arena: Arena) -> None:
    dispatcher, worker = make_dispatcher(arena), FakeWorker()
    dispatcher.attach(worker)
    futures = [dispatcher.submit(*background(b"%d" % number)) for number in range(3)]
    await until(lambda: worker.batches)
    worker.die()
    await until(lambda: dispatcher.num_background == 3)
    assert dispatcher.num_queued == 0
    successor = FakeWorker()
    dispatcher.attach(successor)
    while not all(future.done() for future in futures):
        await until(lambda: successor.batches)
        successor.answer()
        await until(lambda: successor.batches or all(future.done() for future in futures))
    assert dispatcher.num_unsettled == 0


async def test_cancelled_work_leaves_the_queue_and_the_arena(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    futures = [dispatcher.submit(*background()) for _ in range(3)]
    for future in futures:
        future.cancel()
    assert (dispatcher.num_background, dispatcher.num_unsettled, arena.used_bytes) == (0, 0, 0)


async def test_it_leaves_half_of_the_arena_to_others(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    dispatcher.submit(*background(bytes(arena.num_bytes // 4)))
    with pytest.raises(OverloadedError, match="little room"):
        dispatcher.submit(*background(bytes(arena.num_bytes // 2)))
    dispatcher.submit(ref_to(bytes(arena.num_bytes // 2)), [bytes(arena.num_bytes // 2)])


async def test_nothing_is_taken_while_draining(arena: Arena) -> None:
    dispatcher = make_dispatcher(arena)
    await dispatcher.drain(0)
    with pytest.raises(UnavailableError):
        dispatcher.submit(*background())
