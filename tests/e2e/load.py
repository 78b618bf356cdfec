"""Numbered requests whose right answers are known, from many clients at once."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import httpx

_COMES_ROUND_S = 0.4
"""A stopping service takes requests for half a second. Later ones, which a machine that stood still
may send, are refused, or find the connection closed."""
_HELD = 10**6
_HELD_S = 1.0
"""Longer than a service that was told to stop waits for its clients to leave."""


@dataclass
class Tally:
    """Counts of the requests by their end."""

    right: int = 0
    wrong: list[object] = field(default_factory=list)
    """Answers other than the right one, refusals included."""
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    """Requests that the server took and did not answer."""
    unconnected: int = 0
    """Requests that found nobody listening."""
    belated: int = 0
    """Requests sent so late that a stopping service may turn them away."""


async def ask_until_stopped(
    url: str, stop: Callable[[], float], holding: Path | None = None
) -> Tally:
    """Have clients ask until nobody listens.

    Args:
        url: The service's.
        stop: Called in a thread once the load is under way; tells the service to stop and returns
            the moment, in seconds of `time.monotonic`.
        holding: Folder of `calls` and `gate` of a `FaultModel`, which holds one call until the
            service waits for that call alone.
    """
    is_under_way = asyncio.Event()
    stopped_at = inf

    def is_over(tally: Tally) -> bool:
        if tally.right > 100:
            is_under_way.set()
        return bool(tally.unconnected)

    def is_belated(sent_at: float) -> bool:
        return sent_at > stopped_at and time.monotonic() > stopped_at + _COMES_ROUND_S

    load = asyncio.ensure_future(ask_until(url, is_over, is_belated=is_belated))
    await asyncio.wait_for(is_under_way.wait(), 60)
    async with held(url, holding) if holding else contextlib.nullcontext():
        stopped_at = await asyncio.to_thread(stop)
    return await asyncio.wait_for(load, 60)


@contextlib.asynccontextmanager
async def held(url: str, folder: Path) -> AsyncIterator[None]:
    """Have a call under way that is held for a while after the block, and then answered right."""
    gate, calls = folder / "gate", folder / "calls"
    gate.touch()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"instances": [{"n": _HELD, "do": "wait"}]}
        post = asyncio.ensure_future(client.post("/predict", json=body))
        async with asyncio.timeout(60):
            while str(_HELD) not in calls.read_text().split():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield
        await asyncio.sleep(_HELD_S)
        gate.unlink()
        answer = await post
        assert answer.status_code == 200, answer.text
        assert answer.json()["predictions"][0]["twice"] == 2 * _HELD


async def ask_until(
    url: str,
    is_over: Callable[[Tally], bool],
    *,
    num_clients: int = 16,
    do: Callable[[int], str] = lambda n: "ok",
    is_belated: Callable[[float], bool] = lambda sent_at: False,
) -> Tally:
    """Have clients ask `FaultModel` for doubled numbers, each the next when it has an answer.

    Args:
        url: The service's.
        is_over: Asked before each request.
        num_clients: How many ask at once.
        do: What the model is to do with a number.
        is_belated: Whether the service may now turn away a request sent at this moment.
    """
    tally = Tally()
    numbers = iter(range(10**9))

    async def ask() -> None:
        # To read certificates for each of them would hold all up for half a second and more.
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
            while not is_over(tally):
                n = next(numbers)
                body = {"instances": [{"n": n, "do": do(n)}]}
                sent_at = time.monotonic()
                try:
                    answer = await client.post("/predict", json=body)
                except httpx.ConnectError:
                    tally.unconnected += 1
                    return
                except httpx.HTTPError as error:
                    if is_belated(sent_at):
                        tally.belated += 1
                    else:
                        tally.unanswered.append(f"{n}: {error!r}")
                    continue
                tally.statuses[answer.status_code] += 1
                try:
                    value = answer.json()
                except ValueError:  # a proxy's own page
                    value = answer.text
                if answer.status_code == 200 and value["predictions"][0]["twice"] == 2 * n:
                    tally.right += 1
                elif answer.status_code == 503 and is_belated(sent_at):
                    tally.belated += 1
                else:
                    tally.wrong.append((n, answer.status_code, value))

    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return tally


def after(seconds: float) -> Callable[[Tally], bool]:
    """Return what is true once some seconds have passed."""
    until = time.monotonic() + seconds
    return lambda tally: time.monotonic() > until
