"""Numbered requests whose right answers are known, from many clients at once."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx


@dataclass
class Tally:
    """What became of the requests."""

    right: int = 0
    wrong: list[object] = field(default_factory=list)
    """Answers other than the right one, refusals included."""
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    """Requests that the server had taken, and gave no answer to."""
    unconnected: int = 0
    """Requests that found nobody listening: never taken, so nothing is owed."""


async def ask_until_stopped(url: str, stop: Callable[[], None]) -> Tally:
    """Have clients ask until nobody listens any more, with `stop` called once they are at it."""
    is_under_way = asyncio.Event()

    def is_over(tally: Tally) -> bool:
        if tally.right > 100:
            is_under_way.set()
        return bool(tally.unconnected)

    load = asyncio.ensure_future(ask_until(url, is_over))
    await asyncio.wait_for(is_under_way.wait(), 30)
    stop()
    return await asyncio.wait_for(load, 20)


async def ask_until(
    url: str,
    is_over: Callable[[Tally], bool],
    *,
    num_clients: int = 16,
    do: Callable[[int], str] = lambda n: "ok",
) -> Tally:
    """Have clients ask `FaultModel` for doubled numbers, each the next when it has an answer."""
    tally = Tally()
    numbers = iter(range(10**9))

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            while not is_over(tally):
                n = next(numbers)
                body = {"instances": [{"n": n, "do": do(n)}]}
                try:
                    answer = await client.post("/predict", json=body)
                except httpx.ConnectError:
                    tally.unconnected += 1
                    return
                except httpx.HTTPError as error:
                    tally.unanswered.append(f"{n}: {error!r}")
                    continue
                tally.statuses[answer.status_code] += 1
                value = answer.json()
                if answer.status_code == 200 and value["predictions"][0]["twice"] == 2 * n:
                    tally.right += 1
                else:
                    tally.wrong.append((n, answer.status_code, value))

    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return tally


def after(seconds: float) -> Callable[[Tally], bool]:
    """Over once some time has passed."""
    until = time.monotonic() + seconds
    return lambda tally: time.monotonic() > until
