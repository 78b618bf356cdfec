import asyncio
import itertools

import pytest

from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.questions import EchoQuestion
from tests.service.tools.chaos.fake_service import Act, fake_service

_NUM = 40
_ODD = 17


def ask(act: Act, *, timeout_s: float = 20.0) -> ChaosTally:
    """Forty numbered requests, one of which is answered otherwise."""

    async def go() -> ChaosTally:
        tally = ChaosTally()
        async with fake_service(lambda number: act if number == _ODD else "ok") as (_, address):
            load = NumberedLoad(
                address=address,
                questions=[EchoQuestion("/predict/echo", 1)],
                tally=tally,
                timeout_s=timeout_s,
                is_over=lambda: tally.num_sent >= _NUM,
            )
            await load.run(itertools.count(), 3)
        return tally

    return asyncio.run(go())


def counts(tally: ChaosTally) -> tuple[int, ...]:
    return tally.right, tally.wrong, tally.lost, tally.duplicated, tally.expired


def test_answers_that_are_right_are_all_counted_as_right():
    tally = ask("ok")
    assert tally.num_sent == _NUM
    assert counts(tally) == (_NUM, 0, 0, 0, 0)
    assert tally.latency.num == _NUM
    assert tally.examples == []


@pytest.mark.parametrize("act", ["wrong", "swapped", "wrong_id", "failed"])
def test_answer_of_another_input_or_none_at_all_is_wrong_and_is_shown(act: Act):
    tally = ask(act)
    assert counts(tally) == (_NUM - 1, 1, 0, 0, 0)
    assert tally.examples[0].startswith(f"request {_ODD} is wrong: ")


def test_connection_that_ends_without_an_answer_has_lost_its_request():
    assert counts(ask("lost")) == (_NUM - 1, 0, 1, 0, 0)


def test_request_that_has_no_answer_by_its_deadline_and_more_is_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("inferpool.service.tools.chaos.load.PATIENCE_S", 0.1)
    assert counts(ask("silent", timeout_s=0.5)) == (_NUM - 1, 0, 1, 0, 0)


@pytest.mark.parametrize("act", ["twice", "late_twice"])
def test_second_answer_is_seen_beside_the_first(act: Act):
    tally = ask(act)
    assert (tally.wrong, tally.lost) == (0, 0)
    assert tally.duplicated == 1


def test_refused_request_is_asked_again_and_nothing_is_owed_for_it():
    tally = ask("refused")
    assert counts(tally) == (_NUM, 0, 0, 0, 0)
    assert tally.refused == {429: 1}
    assert (tally.num_sent, tally.num_instances_sent) == (_NUM, _NUM + 1)


def test_deadline_that_passed_is_an_answer_but_no_right_one():
    assert counts(ask("expired")) == (_NUM - 1, 0, 0, 0, 1)


def test_service_that_is_gone_ends_the_load():
    async def go() -> None:
        tally = ChaosTally()
        load = NumberedLoad(
            address=("127.0.0.1", 1),
            questions=[EchoQuestion("/", 1)],
            tally=tally,
            timeout_s=1,
            is_over=lambda: False,
        )
        await load.run(itertools.count(), 2)

    with pytest.raises(ExceptionGroup) as info:
        asyncio.run(go())
    assert info.group_contains(OSError)
