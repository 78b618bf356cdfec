"""Memory that clients of several front ends make them keep: one budget, and a share by owner."""

import asyncio
from collections.abc import Callable
from mmap import mmap

import pytest

from inferpool.service.api.wire.budgets import UnfinishedRequests, UnreadAnswers
from inferpool.service.api.wire.held import HeldBytes, clear, held_bytes, num_bytes_for, place_of
from inferpool.service.errors import OverloadedError, OverShareError, ServiceError
from tests.virtual_time import run_in_virtual_time

MAX_BYTES = 8000
SHARE = 0.75
NUM_FRONTS = 2


class HoldingClient:
    """A client of one owner: a sender or a reader, which never goes on."""

    num_unread_bytes = 1000

    def __init__(self, of: str) -> None:
        self.of = of
        self.is_dropped = False

    def owner(self) -> str:
        return self.of

    def cut_off(self) -> None:
        self.is_dropped = True

    def give_way(self, error: ServiceError) -> None:
        self.is_dropped = True


def num_left(clients: list[HoldingClient]) -> int:
    return sum(not each.is_dropped for each in clients)


def clock() -> float:
    return asyncio.get_running_loop().time()


def in_two_fronts(
    test: Callable[[mmap, tuple[HeldBytes, HeldBytes], tuple[HeldBytes, HeldBytes]], object],
) -> None:
    """Run a test with what two fronts count: unfinished requests, and unread answers."""
    memory = mmap(-1, num_bytes_for(NUM_FRONTS))

    async def main() -> None:
        await test(memory, held_bytes(memory, 0), held_bytes(memory, 1))  # type: ignore[misc]  # it is a coroutine function

    run_in_virtual_time(main(), 60)


def test_counts_of_one_front_are_seen_by_the_other_and_given_back_at_its_end() -> None:
    memory = mmap(-1, num_bytes_for(NUM_FRONTS))
    fronts = [held_bytes(memory, number) for number in range(NUM_FRONTS)]
    for number, kinds in enumerate(fronts):
        for kind, held in enumerate(kinds):
            held.add(place_of("a"), 10 ** (2 * number + kind))
    assert [[each.total for each in kinds] for kinds in fronts] == [[101, 1010]] * 2
    assert fronts[0][1].of(place_of("a")) == 1010
    assert fronts[0][1].greatest() == place_of("a")
    clear(memory, 0)
    assert [[each.total for each in kinds] for kinds in fronts] == [[100, 1000]] * 2
    assert fronts[1][0].of(place_of("a")) == 100


def test_a_greedy_reader_has_its_share_and_no_other_one_is_cut() -> None:
    async def main() -> None:
        answers = UnreadAnswers(MAX_BYTES, share=SHARE)
        greedy = [HoldingClient("greedy") for _ in range(20)]
        for each in greedy[:10]:
            answers.take(each, 1000)
        assert answers.num_bytes <= SHARE * MAX_BYTES
        other = HoldingClient("other")
        answers.take(other, 1000)
        for each in greedy[10:]:
            answers.take(each, 1000)
        assert not other.is_dropped
        assert 4000 <= answers.num_bytes - 1000 <= SHARE * (MAX_BYTES - 1000)

    run_in_virtual_time(main())


def test_the_only_answer_of_an_owner_may_take_all_that_is_left() -> None:
    async def main() -> None:
        answers = UnreadAnswers(MAX_BYTES, share=SHARE)
        one, other = HoldingClient("one"), HoldingClient("other")
        answers.take(one, 7000)
        answers.take(other, 1000)
        assert num_left([one, other]) == 2

    run_in_virtual_time(main())


def test_who_asks_first_does_not_keep_a_later_one_from_its_part() -> None:
    async def main() -> None:
        answers = UnreadAnswers(MAX_BYTES, share=SHARE)
        owners = {name: [HoldingClient(name) for _ in range(60)] for name in "ab"}
        for clients in owners.values():
            for each in clients:
                answers.take(each, 100)
        parts = [num_left(clients) for clients in owners.values()]
        assert min(parts) >= 25
        assert sum(parts) <= MAX_BYTES // 100

    run_in_virtual_time(main())


def test_readers_of_one_front_make_room_for_those_of_another() -> None:
    async def test(_memory: mmap, first: tuple[HeldBytes, ...], second: tuple[HeldBytes, ...]):
        here = UnreadAnswers(MAX_BYTES, share=SHARE, held=first[1])
        there = UnreadAnswers(MAX_BYTES, share=SHARE, held=second[1])
        greedy = [HoldingClient("greedy") for _ in range(40)]
        for each in greedy:
            here.take(each, 1000)
        others = [HoldingClient(f"other {number}") for number in range(4)]
        for each in others:
            there.take(each, 1000)
            assert first[1].total <= MAX_BYTES
            await asyncio.sleep(0.3)
        assert num_left(others) == 4
        assert 2000 <= here.num_bytes <= 4000
        more = [HoldingClient("greedy") for _ in range(10)]
        for each in more:  # its share is one over both fronts
            there.take(each, 1000)
        assert first[1].of(place_of("greedy")) <= SHARE * (MAX_BYTES - 4000)
        assert num_left(others) == 4

    in_two_fronts(test)


def test_unfinished_requests_of_one_owner_leave_room_for_others_in_every_front() -> None:
    async def test(_memory: mmap, first: tuple[HeldBytes, ...], second: tuple[HeldBytes, ...]):
        here = UnfinishedRequests(MAX_BYTES, clock, share=SHARE, held=first[0])
        there = UnfinishedRequests(MAX_BYTES, clock, share=SHARE, held=second[0])
        greedy = [HoldingClient("greedy") for _ in range(8)]
        for number, each in enumerate(greedy[:6]):
            (here, there)[number % 2].hold(each, 1000)
        for budget, each in zip((here, there), greedy[6:], strict=True):
            with pytest.raises(OverShareError, match="per_key_share"):
                budget.hold(each, 1000)
        other, late = HoldingClient("other"), HoldingClient("late")
        there.hold(other, 1000)
        there.hold(late, 900)
        with pytest.raises(OverloadedError, match="max_unfinished_bytes"):
            there.hold(late, 1001)
        await asyncio.sleep(2)  # now the others have shown that they are slow
        there.hold(late, 1500)
        assert num_left(greedy[:6]) < 6
        assert num_left([other, late]) == 2
        assert first[0].total <= MAX_BYTES

    in_two_fronts(test)


def test_a_front_that_died_leaves_its_part_to_the_others() -> None:
    async def test(memory: mmap, first: tuple[HeldBytes, ...], second: tuple[HeldBytes, ...]):
        dead = UnfinishedRequests(MAX_BYTES, clock, held=first[0])
        alive = UnfinishedRequests(MAX_BYTES, clock, held=second[0])
        dead.hold(HoldingClient("a"), MAX_BYTES)
        with pytest.raises(OverloadedError):
            alive.hold(HoldingClient("b"), MAX_BYTES)
        clear(memory, 0)
        alive.hold(HoldingClient("b"), MAX_BYTES)

    in_two_fronts(test)
