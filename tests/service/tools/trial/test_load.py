"""The load generator against small servers that answer each request as they are told to."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from inferpool.service.tools.trial.connection import Address, TrialError, post_request
from inferpool.service.tools.trial.load import (
    LoadExchange,
    LoadGenerator,
    LoadPlan,
    require_answers,
)
from inferpool.service.tools.trial.tally import LoadTally
from tests.service.tools.chaos.fake_service import serving

_REQUEST = post_request("/predict", b"hi", "text/plain")
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
_FAILED = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"

Answer = Callable[[int], Sequence[bytes] | float | None]
"""The pieces of the answer to a request, by its number; seconds of silence; None hangs up."""


def load(
    answer: Answer, request: bytes = _REQUEST, delay_s: float = 0.0, **plan: object
) -> LoadGenerator:
    """Load a small server until the plan is done."""
    numbers = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readexactly(len(request)):
            pieces = answer(next(numbers))
            if pieces is None:
                return
            if isinstance(pieces, float):
                await asyncio.sleep(pieces)
                return
            await asyncio.sleep(delay_s)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if b"close" in pieces[0]:
                return

    async def go() -> LoadGenerator:
        async with serving(serve) as address:
            return await run(address, requests=[request], **plan)

    return asyncio.run(go())


async def run(address: Address, **plan: object) -> LoadGenerator:
    generator = LoadGenerator(
        LoadPlan(address=address, **{"connections": 3, **plan})  # type: ignore[arg-type]
    )
    await asyncio.wait_for(generator.run(), 30)
    return generator


def test_a_closed_loop_is_measured_for_its_time():
    generator = load(lambda _: [_OK], duration_s=0.1, warmup_s=0.05)
    tally = generator.tally
    assert tally.num_requests == tally.num_good == tally.statuses["200"] >= 6
    assert tally.num_in_time == pytest.approx(tally.num_good, abs=3)
    assert tally.received_bytes == 5 * tally.num_good
    assert tally.sent_bytes == len(_REQUEST) * tally.num_good
    assert generator.measured_s == pytest.approx(0.1)
    assert 0 < generator.finished_s < 5
    assert generator.cpu_s > 0


def test_each_connection_has_two_answers_however_slow_they_are():
    generator = load(
        lambda _: [_OK], connections=8, duration_s=0.0, least_answers=16, warmup_answers=4
    )
    assert generator.tally.num_in_time >= 16
    assert generator.measured_s > 0


@pytest.mark.parametrize("cut", [1, 20, len(_OK) - 5, len(_OK) - 1])
@pytest.mark.parametrize("whole", [_OK, _CHUNKED])
def test_answer_that_comes_in_pieces_is_one_answer(whole: bytes, cut: int):
    tally = load(lambda _: [whole[:cut], whole[cut:]], num_requests=6).tally
    assert (tally.num_good, tally.received_bytes) == (6, 30)


@pytest.mark.parametrize(
    "whole",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nserver: closes\r\n\r\nhi",
    ],
)
def test_service_that_closes_its_connection_is_asked_on_another(whole: bytes):
    tally = load(lambda _: [whole], num_requests=6).tally
    assert (tally.num_good, tally.num_errors) == (6, 0)
    assert tally.received_bytes == 12


def test_kinds_of_failures_are_counted_apart():
    def answer(number: int) -> Sequence[bytes] | float | None:
        return [[_OK], [_FAILED], None, [b"SSH-2.0-x\r\n\r\n"], 60.0][number % 5]

    tally = load(answer, num_requests=20, timeout_s=0.3).tally
    assert tally.errors["status 500"] == tally.statuses["500"] == tally.refusal.num == 4
    assert tally.errors["connection broken"] == 8
    assert tally.errors["timeout"] == 4
    assert tally.given_up.num == 12
    assert tally.given_up.max_s >= 0.3
    assert tally.num_good == 4


def test_a_judge_sees_each_answer_and_decides_what_is_good():
    numbers = []

    def judge(exchange: LoadExchange, tally: LoadTally) -> str:
        assert exchange.answer is not None
        numbers.append(exchange.number)
        tally.sums["bodies"] += len(exchange.answer.body)
        return "odd" if exchange.number % 2 else ""

    tally = load(lambda _: [_OK], num_requests=10, judge=judge).tally
    assert sorted(numbers) == list(range(10))
    assert tally.errors == {"odd": 5}
    assert (tally.num_good, tally.sums["bodies"]) == (5, 50)


def test_a_judge_that_fails_ends_the_run():
    def judge(exchange: LoadExchange, _: LoadTally) -> str:
        raise ValueError(exchange.number)

    with pytest.raises(ValueError, match="0"):
        load(lambda _: [_OK], judge=judge, connections=1)


def test_requests_may_be_made_by_number_or_sent_in_random_order():
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readexactly(len(_REQUEST)):
            seen.append(request)
            writer.write(_OK)

    async def go(**plan: object) -> list[bytes]:
        seen.clear()
        async with serving(serve) as address:
            await run(address, connections=1, num_requests=20, **plan)
        return [request[-2:] for request in seen]

    def request_of(number: int) -> bytes:
        return post_request("/predict", b"%02d" % number, "text/plain")

    in_turn = [b"%02d" % number for number in range(20)]
    assert asyncio.run(go(requests=request_of)) == in_turn
    requests = [request_of(number) for number in range(20)]
    assert asyncio.run(go(requests=requests)) == in_turn
    shuffled = asyncio.run(go(requests=requests, is_shuffled=True, seed=1))
    assert shuffled != in_turn == sorted(shuffled)
    assert asyncio.run(go(requests=requests, is_shuffled=True, seed=1)) == shuffled


def test_an_open_loop_counts_latencies_from_the_moment_requests_were_due():
    tally = load(lambda _: [_OK], delay_s=0.02, rate=200.0, num_requests=20, connections=1).tally
    assert tally.num_good == 20
    assert tally.lateness.max_s > 0.1  # 20 requests take 0.4 s, and are due within 0.1 s or so
    assert tally.latency.max_s > tally.lateness.max_s


def test_an_open_loop_opens_no_more_connections_than_it_may_and_gives_up_what_waits_too_long():
    tally = load(lambda _: 60.0, rate=200.0, duration_s=0.3, connections=1, timeout_s=0.2).tally
    assert set(tally.errors) == {"timeout"}
    assert tally.num_errors > 20


def test_requests_at_even_distances_are_as_many_as_the_rate_says():
    tally = load(lambda _: [_OK], rate=100.0, duration_s=0.5, is_even=True).tally
    assert 45 <= tally.num_good <= 51


@pytest.mark.parametrize("plan", [{}, {"rate": 200.0}])
def test_service_that_is_gone_is_an_error(plan: dict[str, float]):
    generator = asyncio.run(run(("127.0.0.1", 1), requests=[_REQUEST], duration_s=0.2, **plan))
    assert set(generator.tally.errors) == {"cannot connect"}
    with pytest.raises(TrialError, match="no request was answered well: cannot connect"):
        require_answers(generator.tally)


def test_a_run_that_is_stopped_counts_what_is_under_way_as_unfinished():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(_REQUEST))
        await asyncio.sleep(60)

    async def go() -> LoadTally:
        async with serving(serve) as address:
            plan = LoadPlan(address=address, requests=[_REQUEST], connections=3)
            generator = LoadGenerator(plan)
            asyncio.get_running_loop().call_later(0.2, generator.stop, 0.05)
            return await generator.run()

    tally = asyncio.run(go())
    assert (tally.num_unfinished, tally.num_requests) == (3, 0)
