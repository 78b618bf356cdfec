"""The load generator against small servers that answer each request as they are told to.

The clock stands still while anything goes on, and jumps while all wait.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from inferpool.service.tools.trial.connection import TrialError, post_request
from inferpool.service.tools.trial.load import (
    LoadExchange,
    LoadGenerator,
    LoadPlan,
    require_answers,
)
from inferpool.service.tools.trial.tally import LoadTally
from tests.service.tools.fake_service import serving

pytestmark = pytest.mark.usefixtures("virtual_time")

_REQUEST = post_request("/predict", b"hi", "text/plain")
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
_FAILED = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
_SILENT_S = 600.0

Answer = Callable[[int], Sequence[bytes] | None]
"""The pieces of the answer to a request, by its number: none is silence, None hangs up."""


async def load(
    answer: Answer = lambda _: [_OK],
    *,
    delay_s: float = 0.0,
    seen: list[bytes] | None = None,
    stop_s: float | None = None,
    **plan: Any,
) -> LoadGenerator:
    """Load a small server until the plan is done, or stopped."""
    numbers = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readexactly(len(_REQUEST)):
            if seen is not None:
                seen.append(request[-2:])
            pieces = answer(next(numbers))
            if pieces is None:
                return
            await asyncio.sleep(delay_s if pieces else _SILENT_S)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if b"close" in pieces[0]:
                return

    async with serving(serve) as address:
        whole = {"address": address, "requests": [_REQUEST], "connections": 3, **plan}
        generator = LoadGenerator(LoadPlan(**whole))
        if stop_s is not None:
            asyncio.get_running_loop().call_later(stop_s, generator.stop, 0.05)
        await generator.run()
    return generator


async def test_a_closed_loop_is_measured_for_its_time():
    generator = await load(delay_s=0.02, duration_s=1.0, warmup_s=0.5)
    tally = generator.tally
    assert 100 <= tally.num_requests == tally.num_good == tally.statuses["200"] <= 150
    assert tally.num_in_time == pytest.approx(tally.num_good, abs=3)
    assert tally.received_bytes == 5 * tally.num_good
    assert tally.sent_bytes == len(_REQUEST) * tally.num_good
    assert generator.measured_s == pytest.approx(1.0)
    assert generator.finished_s == pytest.approx(1.0, abs=0.1)
    assert generator.cpu_s > 0


async def test_each_connection_has_two_answers_however_slow_they_are():
    generator = await load(connections=8, duration_s=0.0, least_answers=16, warmup_answers=4)
    assert generator.tally.num_in_time >= 16


@pytest.mark.parametrize("cut", [1, 20, len(_OK) - 5, len(_OK) - 1])
@pytest.mark.parametrize("whole", [_OK, _CHUNKED])
async def test_answer_that_comes_in_pieces_is_one_answer(whole: bytes, cut: int):
    tally = (await load(lambda _: [whole[:cut], whole[cut:]], num_requests=6)).tally
    assert (tally.num_good, tally.received_bytes) == (6, 30)


@pytest.mark.parametrize(
    "whole",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nserver: closes\r\n\r\nhi",
    ],
)
async def test_service_that_closes_its_connection_is_asked_on_another(whole: bytes):
    tally = (await load(lambda _: [whole], num_requests=6)).tally
    assert (tally.num_good, tally.num_errors, tally.received_bytes) == (6, 0, 12)


async def test_kinds_of_failures_are_counted_apart():
    kinds: list[Sequence[bytes] | None] = [[_OK], [_FAILED], None, [b"SSH-2.0-x\r\n\r\n"], []]
    tally = (await load(lambda n: kinds[n % 5], num_requests=20, timeout_s=10)).tally
    assert tally.errors == {"status 500": 4, "connection broken": 8, "timeout": 4}
    assert (tally.statuses["500"], tally.refusal.num, tally.num_good) == (4, 4, 4)
    assert tally.given_up.num == 12
    assert tally.given_up.max_s >= 10


async def test_a_judge_sees_each_answer_and_decides_what_is_good():
    numbers = []

    def judge(exchange: LoadExchange, tally: LoadTally) -> str:
        assert exchange.answer is not None
        numbers.append(exchange.number)
        tally.sums["bodies"] += len(exchange.answer.body)
        return "odd" if exchange.number % 2 else ""

    tally = (await load(num_requests=10, judge=judge)).tally
    assert sorted(numbers) == list(range(10))
    assert tally.errors == {"odd": 5}
    assert (tally.num_good, tally.sums["bodies"]) == (5, 50)


async def test_a_judge_that_fails_ends_the_run():
    def judge(exchange: LoadExchange, _: LoadTally) -> str:
        raise ValueError(exchange.number)

    with pytest.raises(ValueError, match="0"):
        await load(judge=judge, connections=1)


async def test_requests_may_be_made_by_number_or_sent_in_random_order():
    async def order(**plan: Any) -> list[bytes]:
        seen: list[bytes] = []
        await load(seen=seen, connections=1, num_requests=20, **plan)
        return seen

    def request_of(number: int) -> bytes:
        return post_request("/predict", b"%02d" % number, "text/plain")

    in_turn = [b"%02d" % number for number in range(20)]
    requests = [request_of(number) for number in range(20)]
    assert await order(requests=request_of) == await order(requests=requests) == in_turn
    shuffled = await order(requests=requests, is_shuffled=True, seed=1)
    assert shuffled != in_turn == sorted(shuffled)
    assert await order(requests=requests, is_shuffled=True, seed=1) == shuffled


async def test_an_open_loop_counts_latencies_from_the_moment_requests_were_due():
    tally = (await load(delay_s=0.02, rate=200.0, num_requests=20, connections=1)).tally
    assert tally.num_good == 20
    assert tally.lateness.max_s > 0.1  # 20 requests take 0.4 s, and are due within 0.1 s or so
    assert tally.latency.max_s > tally.lateness.max_s


async def test_an_open_loop_gives_up_what_waits_too_long_for_a_connection():
    plan = {"rate": 200.0, "duration_s": 0.3, "connections": 1, "timeout_s": 0.2}
    tally = (await load(lambda _: [], **plan)).tally
    assert set(tally.errors) == {"timeout"}
    assert tally.num_errors > 20


async def test_requests_at_even_distances_are_as_many_as_the_rate_says():
    tally = (await load(rate=100.0, duration_s=0.5, is_even=True)).tally
    assert 49 <= tally.num_good <= 50


@pytest.mark.parametrize("plan", [{}, {"rate": 200.0}])
async def test_service_that_is_gone_is_an_error(plan: dict[str, float]):
    generator = await load(address=("127.0.0.1", 1), duration_s=0.2, **plan)
    assert set(generator.tally.errors) == {"cannot connect"}
    with pytest.raises(TrialError, match="no request was answered well: cannot connect"):
        require_answers(generator.tally)


async def test_a_run_that_is_stopped_counts_what_is_under_way_as_unfinished():
    tally = (await load(lambda _: [], stop_s=0.2)).tally
    assert (tally.num_unfinished, tally.num_requests) == (3, 0)
