import asyncio
import contextlib
import itertools
import time

import httpx
import pytest

from inferpool.service.client import AsyncClient, DeadlineExceededError, InferpoolError, Prediction
from inferpool.service.client.errors import InvalidInputError


def test_unordered_results_come_as_soon_as_they_are_there(client):
    asked = [{"n": 1, "do": "sleep"}, *({"n": n} for n in range(2, 4))]
    options = {"is_ordered": False, "max_concurrency": 3}
    results = list(client.predict_many(asked, model="fault", **options))
    assert sorted(each.index for each in results) == [0, 1, 2]
    assert {each.index: each.value["twice"] for each in results} == {0: 2, 1: 4, 2: 6}


def test_error_stands_in_its_place_or_is_raised(client):
    asked, told = [{"n": 1}, {"n": "x"}, {"n": 3}], []
    options = {"return_errors": True, "on_progress": told.append}
    results = list(client.predict_many(asked, model="fault", **options))
    assert [isinstance(each, Prediction) for each in results] == [True, False, True]
    assert [each.index for each in results] == [0, 1, 2]
    assert [each.num_done for each in told] == [1, 2, 3]
    assert (told[-1].num_failed, told[-1].num_running) == (1, 0)
    iterator = client.predict_many(asked, model="fault")
    assert next(iterator).value["twice"] == 2
    with pytest.raises(InvalidInputError) as raised:
        next(iterator)
    assert raised.value.index == 1


def test_inputs_are_read_only_when_there_is_room_and_results_come_in_their_order(client):
    drawn = itertools.count()
    results = client.predict_many(drawn, model="echo", max_concurrency=3)
    taken = [next(results).value for _ in range(20)]
    assert taken == list(range(20))
    results.close()
    assert next(drawn) <= 20 + 3 * 4 + 1


@pytest.mark.measures
def test_leaving_the_loop_cancels_what_waits(client):
    asked = [{"n": 1}, *[{"n": 2, "do": "sleep"}] * 100]
    started = time.monotonic()
    for each in client.predict_many(asked, model="fault", max_concurrency=3):
        assert each.value["twice"] == 2
        break
    assert time.monotonic() - started < 15


async def test_results_are_yielded_while_the_next_input_is_awaited(service):
    more = asyncio.Event()

    async def inputs():
        yield "first"
        await more.wait()
        yield "second"

    async with (
        AsyncClient(service.url) as client,
        contextlib.aclosing(client.predict_many(inputs(), model="echo")) as results,
    ):
        assert (await anext(results)).value == "first"
        more.set()
        assert [each.value async for each in results] == ["second"]


async def test_predictions_wait_for_a_connection_as_long_as_they_may():
    asked: asyncio.Queue[httpx.Request] = asyncio.Queue()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.put_nowait(request)
        return await asyncio.Future()

    transport = httpx.MockTransport(answer)
    async with AsyncClient(transport=transport, max_concurrency=2) as client:
        holding = [asyncio.create_task(client.predict(n)) for n in range(2)]
        for _ in holding:
            await asked.get()
        with pytest.raises(DeadlineExceededError, match="no connection was free"):
            await client.predict(3, timeout_s=0.05)
        assert asked.empty()
        waiting = asyncio.create_task(client.predict(4))
        holding[0].cancel()
        await asked.get()
        for task in (holding[1], waiting):
            task.cancel()
        await asyncio.wait([*holding, waiting])


async def test_cancelled_prediction_leaves_nothing_behind(service):
    async with AsyncClient(service.url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.predict({"n": 1, "do": "sleep"}, model="fault")
        assert (await client.predict({"n": 4}, model="fault")).value["twice"] == 8


def test_unusable_inputs_and_no_room_are_errors(client):
    def inputs():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(client.predict_many(inputs(), model="echo"))
    with pytest.raises(ValueError, match="at least 1"):
        list(client.predict_many([1], max_concurrency=0))
    with pytest.raises(InferpoolError):
        list(client.predict_many([float("nan")]))
