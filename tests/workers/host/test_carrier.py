import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from inferpool.workers.errors import WorkerLostError
from inferpool.workers.host.carrier import Carrier
from inferpool.workers.messages import BatchDone, ItemRef


@contextmanager
def carrying() -> Iterator[Carrier]:
    heartbeat = SimpleNamespace(last_received=0, progressed_at=0.0, at_work_since=0.0)
    made = Carrier(
        heartbeat,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]  # no answer in these tests has outputs of its own
        wanted_timeout_s=10.0,
        patience_s=1.0,
    )
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        made.attach(writer)
        yield made
        made.close()


def item() -> ItemRef:
    return ItemRef(kind="json", offset=0, num_bytes=1, deadline=0.0)


async def test_batch_that_nobody_waits_for_keeps_no_other_from_its_failure():
    with carrying() as carrier:
        cancelled, waiting = carrier.give([item()]), carrier.give([item()])
        cancelled.cancel()
        assert not carrier.lose_all("killed", is_our_doing=False)
        assert not carrier.held
        with pytest.raises(WorkerLostError, match="killed"):
            await asyncio.wait_for(waiting, 1)


async def test_answer_that_nobody_waits_for_is_taken_like_others():
    with carrying() as carrier:
        cancelled, waiting = carrier.give([item()]), carrier.give([item()])
        cancelled.cancel()
        for id in (1, 2):
            carrier.take(BatchDone(id, ["right"], 0.0, 0.0, 0, 0.0, 0.0))
        assert (await asyncio.wait_for(waiting, 1)).outcomes == ["right"]
        assert carrier.has_worked
        assert not carrier.held
