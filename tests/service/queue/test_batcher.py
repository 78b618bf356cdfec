import random
from dataclasses import dataclass

from inferpool.service.queue.batcher import Batcher, Bucket
from inferpool.workers.shared.messages import ItemRef


@dataclass(eq=False)
class Queued:
    name: str
    priority: int = 5
    deadline: float = 30.0
    arrived: float = 0.0
    is_solo: bool = False
    bucket: Bucket | None = None
    caller: int = 0

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline, priority=self.priority, caller=self.caller)


def names(batch: list[Queued]) -> str:
    return "".join(request.name for request in batch)


def filled(*requests: Queued) -> Batcher[Queued]:
    batcher: Batcher[Queued] = Batcher()
    for request in requests:
        batcher.push(request, now=0.0)
    return batcher


def test_position_tells_how_many_of_its_caller_wait_wherever_they_are():
    hopeless, near, far = Queued("h", deadline=0.01), Queued("n", deadline=9.0), Queued("f")
    for request in (hopeless, near, far):
        request.ref.caller = 1
    batcher = filled(hopeless, near, far, Queued("o", caller=2), Queued("x"))

    def own(caller: int, deadline: float = 20.0) -> tuple[int, int]:
        return batcher.position(5, deadline, 0.0, caller)[-2:]

    assert own(1) == (3, 2)
    assert own(1, deadline=40.0) == (3, 3)
    assert own(2, deadline=40.0) == (1, 1)
    assert own(0) == own(3) == (0, 0)
    batcher.put_last(1.0)
    assert own(1) == (3, 1)
    assert batcher.next_batch(1) == [near]
    assert own(1) == (2, 0)
    batcher.push_front(near)
    assert own(1) == (3, 1)
    batcher.remove(hopeless)
    assert own(1) == (2, 1)
    batcher.next_batch(8)
    assert own(1) == own(2) == (0, 0)


def test_solo_request_comes_alone_and_first_when_put_back():
    first, second = Queued("a"), Queued("b")
    batcher = filled(first, second, Queued("c"))
    taken = batcher.next_batch(2)
    for request in reversed(taken):
        request.is_solo = True
        batcher.push_front(request)
    assert [names(batcher.next_batch(8)) for _ in range(4)] == ["a", "b", "c", ""]


def test_nearer_deadline_goes_first_however_late_it_comes():
    batcher = filled(Queued("c", deadline=30.0))
    batcher.push(Queued("b", deadline=29.0), now=20.0)
    batcher.push(Queued("a", deadline=20.05), now=20.0)
    batcher.push(Queued("d", deadline=50.0), now=20.0)
    assert names(batcher.next_batch(8)) == "abcd"


def test_deadline_goes_before_priority_while_something_would_be_late():
    batcher = filled(Queued("b", priority=9, deadline=9.0), Queued("a", priority=1))
    batcher.arrange(lambda deadline, num: True)
    assert batcher.oldest().name == "a"
    batcher.arrange(lambda deadline, num: (deadline, num) != (9.0, 1))
    assert batcher.oldest().name == "b"
    batcher.push(Queued("c", priority=5, deadline=20.0), now=0.0)
    assert names(batcher) == "bca"
    batcher.arrange(lambda deadline, num: True)
    assert names(batcher.next_batch(8)) == "acb"


def test_requests_that_will_be_late_anyway_go_last():
    batcher = filled(
        Queued("d", deadline=0.5), Queued("e", deadline=0.6), Queued("a", deadline=0.9),
        Queued("b"), Queued("c"),
    )  # fmt: skip
    batcher.put_last(0.7)
    assert len(batcher) == 5
    assert batcher.soonest() > 0.6
    assert [names(batcher.next_batch(2)) for _ in range(3)] == ["ab", "cd", "e"]


def test_a_request_put_back_after_its_bucket_closed_goes_first_again():
    first = Queued("a")
    batcher = filled(first, Queued("b"))
    assert names(batcher.next_batch(2)) == "ab"
    batcher.push(Queued("c", deadline=40.0), now=10.0)
    batcher.push(Queued("d", deadline=30.1), now=0.1)
    batcher.push_front(first)
    assert names(batcher.next_batch(8)) == "adc"


def test_position_counts_requests_ahead_and_those_with_earlier_deadlines():
    batcher: Batcher[Queued] = Batcher()
    for priority, deadline in [(5, 60.0), (5, 0.05), (1, 60.0), (9, 0.05)]:
        batcher.push(Queued("r", priority=priority, deadline=deadline), now=0.0)

    def ahead(priority: int, deadline: float) -> tuple[int, int]:
        position = batcher.position(priority, deadline, now=0.0)
        return position.num_ahead, position.num_by_deadline

    assert ahead(5, 60.0) == (3, 4)
    assert ahead(5, 0.05) == (2, 2)
    assert ahead(1, 60.0) == (1, 4)
    assert ahead(9, 60.0) == (4, 4)
    assert [num for _, num in batcher.position(5, 0.05, now=0.0).behind] == [3, 4]


def test_its_own_kind_is_counted_only_beside_other_kinds():
    batcher = filled(*map(Queued, "abc"))
    batcher.position(1, 300.0, now=0.0)  # it is refused, and leaves no trace
    assert not batcher.is_mixed
    assert batcher.position(5, 30.0, now=0.0).num_kin == 0
    other = Queued("d", priority=1, deadline=300.0)
    batcher.push(other, now=0.0)
    assert batcher.position(5, 30.0, now=0.0).num_kin == 3
    assert batcher.position(9, 30.0, now=0.0).num_kin == 0
    assert batcher.position(5, 50.0, now=20.0).num_kin == 3
    batcher.remove(other)
    assert batcher.position(5, 51.0, now=21.0).num_kin == 0


def test_a_kind_counts_as_recent_for_seconds_whatever_its_timeout():
    batcher = filled(Queued("a", deadline=300.0))
    batcher.next_batch(1)
    batcher.push(Queued("b", deadline=31.0), now=1.0)
    assert batcher.position(5, 31.0, now=1.0).num_kin == 1
    assert batcher.position(5, 55.0, now=25.0).num_kin == 0
    assert not batcher.is_mixed


def test_many_buckets_have_few_sums_and_each_is_a_bound():
    batcher: Batcher[Queued] = Batcher()
    chance = random.Random(3)
    requests = [
        Queued("r", chance.randrange(1, 10), 2 ** chance.uniform(-5, 8)) for _ in range(1000)
    ]
    for request in requests:
        batcher.push(request, now=0.0)
    for priority, deadline in [(1, 0.01), (5, 1.0), (9, 40.0)]:
        position = batcher.position(priority, deadline, now=0.0)
        assert len(position.behind) <= 64
        assert position.behind[-1][1] == len(batcher)
        for due, num in position.behind:
            assert num >= sum(request.deadline <= due for request in requests)
        buckets = {request.bucket for request in requests}
        assert len(buckets) > 500
        first = [bucket for bucket in buckets if bucket.deadline <= deadline]
        assert position.num_by_deadline == sum(len(bucket.instances) for bucket in first)
        assert position.num_ahead == sum(
            len(bucket.instances) * (bucket.priority < priority or bucket in first)
            for bucket in buckets
            if bucket.priority <= priority
        )
    looks = []
    batcher.arrange(lambda deadline, num: looks.append(num) or True)
    assert len(looks) <= 64
    ranks = [(r.bucket.priority, r.bucket.deadline) for r in batcher]
    assert ranks == sorted(ranks)
