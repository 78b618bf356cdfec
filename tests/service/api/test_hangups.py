import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from service.api.hangups import CHECK_EVERY_S, HangupWatch, Waiting


class Client:
    """What `receive` is asked after the body: nothing comes until the client hangs up."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        self.asked.set()
        await self.gone.wait()
        return {"type": "http.disconnect"}


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


def waiting_for(client: Client) -> Waiting:
    return Waiting(asyncio.get_running_loop().create_future(), client.receive)


@in_loop
async def test_the_future_of_a_client_that_hangs_up_is_cancelled() -> None:
    watch, client = HangupWatch(), Client()
    waiting = waiting_for(client)
    watch.add(waiting)
    client.gone.set()
    await asyncio.wait([waiting.future])
    assert waiting.future.cancelled()
    assert waiting.is_gone


@in_loop
async def test_a_call_that_is_answered_soon_is_never_listened_for() -> None:
    watch, client = HangupWatch(), Client()
    waiting = waiting_for(client)
    watch.add(waiting)
    watch.discard(waiting)
    await asyncio.sleep(3 * CHECK_EVERY_S)
    assert not client.asked.is_set()
    assert watch._timer is None


@in_loop
async def test_the_listener_of_a_call_ends_with_its_answer() -> None:
    watch, client = HangupWatch(), Client()
    waiting = waiting_for(client)
    watch.add(waiting)
    await client.asked.wait()
    watch.discard(waiting)
    assert waiting.listener is not None
    await asyncio.wait([waiting.listener])
    assert waiting.listener.cancelled()
    assert not waiting.is_gone
