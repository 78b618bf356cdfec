import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.tune.load import LoadClients, LoadSample
from tests.service.tools.chaos.fake_service import serving

_REQUEST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
_FAILED = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"

Answer = Callable[[int], Sequence[bytes] | None]
"""The pieces of the answer to a request, by its number; None hangs up."""


def serving_with(answer: Answer) -> AbstractAsyncContextManager[tuple[str, int]]:
    numbers = itertools.count(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readexactly(len(_REQUEST)) == _REQUEST:
            pieces = answer(next(numbers))
            if pieces is None:
                return
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return serving(serve)


def ask(answer: Answer, *, num_clients: int = 3, least_s: float = 0.05) -> LoadSample:
    async def go() -> LoadSample:
        async with serving_with(answer) as address:
            load = LoadClients(address, [_REQUEST])
            try:
                return await load.run(num_clients, least_s)
            finally:
                load.close()

    return asyncio.run(go())


def test_answers_are_counted_for_the_time_and_each_has_its_latency():
    sample = ask(lambda _: [_OK])
    assert sample.seconds >= 0.05
    assert sample.num_answers == len(sample.latencies_s) >= 6
    assert sample.num_errors == 0
    assert 0 < sample.percentile_s(50) <= sample.percentile_s(99) <= max(sample.latencies_s)
    assert sample.rate == pytest.approx(sample.num_answers / sample.seconds)
    assert sample.generator_cores > 0


@pytest.mark.parametrize("cut", [1, 20, len(_OK) - 5, len(_OK) - 1])
def test_answer_that_comes_in_pieces_is_one_answer(cut: int):
    sample = ask(lambda _: [_OK[:cut], _OK[cut:]])
    assert sample.num_answers >= 6
    assert sample.num_errors == 0


def test_answer_that_is_no_success_is_an_error_and_not_counted_as_an_answer():
    sample = ask(lambda number: [_OK if number % 2 else _FAILED])
    assert sample.num_errors == sample.errors["status 500"] > 0
    assert abs(sample.num_answers - sample.num_errors) <= 3


def test_connection_that_breaks_is_an_error_and_the_others_go_on():
    sample = ask(lambda number: None if number == 5 else [_OK])
    assert sample.num_errors == 1
    assert sample.num_answers >= 6


def test_each_client_has_two_answers_however_slow_they_are():
    assert ask(lambda _: [_OK], num_clients=8, least_s=0.0).num_answers >= 16


def test_service_that_answers_nothing_well_is_an_error():
    with pytest.raises(TrialError, match="status 500"):
        ask(lambda _: [_FAILED])


def test_service_that_is_gone_is_an_error():
    with pytest.raises(TrialError, match="takes no connection"):
        asyncio.run(LoadClients(("127.0.0.1", 1), [_REQUEST]).run(1, 0.1))
