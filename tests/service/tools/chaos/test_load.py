import itertools

import pytest

from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.questions import EchoQuestion
from inferpool.service.tools.trial.connection import Address
from tests.service.tools.fake_service import Act, echoing

_NUM = 40
_ODD = 17


async def load(address: Address, num: int = _NUM, **changes: float) -> ChaosTally:
    tally = ChaosTally()
    load = NumberedLoad(
        address=address,
        questions=[EchoQuestion("/predict/echo", 1)],
        tally=tally,
        is_over=lambda: tally.num_sent >= num,
        **{"timeout_s": 120.0, **changes},
    )
    await load.run(itertools.count(), 3)
    return tally


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
        ("twice", (_NUM, 0, 0, 1, 0)),
        ("late_twice", (_NUM, 0, 0, 1, 0)),
    ],
)
async def test_each_kind_of_answer_is_counted_apart_and_a_wrong_one_is_shown(
    act: Act, expected: tuple[int, ...]
):
    async with echoing(lambda number: act if number == _ODD else "ok") as address:
        tally = await load(address)
    assert counts(tally) == expected
    assert tally.latency.num == tally.right
    assert tally.refused == ({429: 1} if act == "refused" else {}), "and nothing is owed for it"
    assert (tally.num_sent, tally.num_instances_sent) == (_NUM, _NUM + tally.refused[429])
    assert len(tally.examples) == tally.wrong + tally.lost + tally.duplicated
    shown = [each for each in tally.examples if "nobody had asked" not in each]
    assert all(each.startswith(f"request {_ODD} is ") for each in shown)


async def test_request_that_has_no_answer_by_its_deadline_and_more_is_lost():
    async with echoing(lambda _: "silent") as address:
        tally = await load(address, num=3, timeout_s=0.2, patience_s=0.1)
    assert counts(tally) == (0, 0, 3, 0, 0)


async def test_service_that_is_gone_ends_the_load():
    with pytest.raises(ExceptionGroup) as info:
        await load(("127.0.0.1", 1))
    assert info.group_contains(OSError)
