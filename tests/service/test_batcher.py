from dataclasses import dataclass

from service.batcher import Batcher


@dataclass(eq=False)
class Waiting:
    name: str
    priority: int = 5
    deadline: float = 30.0
    arrived: float = 0.0
    is_solo: bool = False
    lane: int = 0


def names(batch: list[Waiting]) -> str:
    return "".join(request.name for request in batch)


def filled(*requests: Waiting) -> Batcher[Waiting]:
    batcher: Batcher[Waiting] = Batcher()
    for request in requests:
        batcher.push(request, now=0.0)
    return batcher


def test_equals_go_first_come_first_served():
    batcher = filled(*map(Waiting, "abcde"))
    assert names(batcher.next_batch(3)) == "abc"
    assert names(batcher.next_batch(3)) == "de"
    assert batcher.next_batch(3) == []


def test_priority_goes_before_deadline_and_deadline_before_arrival():
    batcher = filled(
        Waiting("d"),
        Waiting("c", deadline=0.5),
        Waiting("a", priority=1),
        Waiting("b", deadline=0.05),
    )
    assert names(batcher.next_batch(8)) == "abcd"


def test_batch_is_filled_from_the_next_class():
    batcher = filled(Waiting("b"), Waiting("a", priority=1), Waiting("c"))
    assert names(batcher.next_batch(2)) == "ab"
    assert len(batcher) == 1


def test_solo_request_comes_alone_and_first_when_put_back():
    first, second = Waiting("a"), Waiting("b")
    batcher = filled(first, second, Waiting("c"))
    taken = batcher.next_batch(2)
    for request in reversed(taken):
        request.is_solo = True
        batcher.push_front(request)
    assert [names(batcher.next_batch(8)) for _ in range(4)] == ["a", "b", "c", ""]


def test_solo_request_of_a_later_class_does_not_join():
    batcher = filled(Waiting("a", priority=1), Waiting("s", is_solo=True), Waiting("c"))
    assert [names(batcher.next_batch(8)) for _ in range(3)] == ["a", "s", "c"]


def test_removed_request_is_not_handed_out():
    middle = Waiting("b")
    batcher = filled(Waiting("a"), middle, Waiting("c"))
    batcher.remove(middle)
    assert len(batcher) == 2
    assert names(batcher.next_batch(8)) == "ac"


def test_what_goes_before_a_request_is_what_is_more_urgent_or_came_sooner():
    batcher: Batcher[Waiting] = Batcher()
    for priority, deadline in [(5, 60.0), (5, 0.05), (1, 60.0), (9, 0.05)]:
        batcher.push(Waiting("r", priority=priority, deadline=deadline), now=0)
    assert batcher.num_ahead(5, 60.0, now=0) == 3
    assert batcher.num_ahead(5, 0.05, now=0) == 2
    assert batcher.num_ahead(1, 60.0, now=0) == 1
    assert batcher.num_ahead(9, 60.0, now=0) == 4
