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


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("ok", (_NUM, 0, 0, 0, 0)),
        ("wrong", (_NUM - 1, 1, 0, 0, 0)),
        ("swapped", (_NUM - 1, 1, 0, 0, 0)),
        ("wrong_id", (_NUM - 1, 1, 0, 0, 0)),
        ("failed", (_NUM - 1, 1, 0, 0, 0)),
        ("lost", (_NUM - 1, 0, 1, 0, 0)),
        ("expired", (_NUM - 1, 0, 0, 0, 1)),
        ("refused", (_NUM, 0, 0, 0, 0)),
    ],
)
def test_each_kind_of_answer_is_counted_apart_and_a_wrong_one_is_shown(
    act: Act, expected: tuple[int, ...]
):
    tally = ask(act)
    assert counts(tally) == expected
    assert tally.latency.num == tally.right
    assert tally.refused == ({429: 1} if act == "refused" else {}), "and nothing is owed for it"
    assert (tally.num_sent, tally.num_instances_sent) == (_NUM, _NUM + tally.refused[429])
    assert len(tally.examples) == tally.wrong + tally.lost
    assert all(each.startswith(f"request {_ODD} is ") for each in tally.examples)


def test_request_that_has_no_answer_by_its_deadline_and_more_is_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("inferpool.service.tools.chaos.load.PATIENCE_S", 0.1)
    assert counts(ask("silent", timeout_s=0.5)) == (_NUM - 1, 0, 1, 0, 0)


@pytest.mark.parametrize("act", ["twice", "late_twice"])
def test_second_answer_is_seen_beside_the_first(act: Act):
    tally = ask(act)
    assert (tally.wrong, tally.lost, tally.duplicated) == (0, 0, 1)


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
