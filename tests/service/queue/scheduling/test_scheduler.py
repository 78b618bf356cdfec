from types import SimpleNamespace

from inferpool.service.queue.scheduling.lanes import Lane, Lanes


def attach(lanes: Lanes, slot: int) -> Lane:
    lanes.attach(SimpleNamespace(id=SimpleNamespace(slot=slot), credit=2))
    return lanes.open[-1]


def answer(lanes: Lanes, lane: Lane, elapsed_s: float) -> None:
    """Have a worker answer a batch of one."""
    lane.batches = [[None]]
    lane.begin(0.0, was_idle=True)
    lanes.learn(lane, 1, elapsed_s)


def test_an_unknown_worker_makes_no_other_lag():
    lanes = Lanes()
    fast = attach(lanes, 0)
    for _ in range(100):
        answer(lanes, fast, 0.02)
    slow = attach(lanes, 1)
    assert lanes.leading == [fast, slow]
    answer(lanes, slow, 0.2)
    assert (lanes.leading, lanes.lagging) == ([fast], [slow])


def busy_until(lane: Lane, ends_at: float) -> None:
    lane.batches = [[None]]
    lane.ends_at = ends_at


def test_an_idle_worker_counts_as_soon_as_it_comes():
    lanes = Lanes()
    busy_until(attach(lanes, 0), 10.0)
    assert lanes.free_in(2.0) == 8.0
    second = attach(lanes, 1)
    assert lanes.free_in(2.0) == 0.0
    busy_until(second, 4.0)
    lanes.detach(SimpleNamespace())
    assert lanes.free_in(2.0) == 0.0
    lanes.give(second, [])
    assert lanes.free_in(2.0) == 5.0
    lanes.detach(second.worker)
    assert lanes.free_in(2.0) == 8.0


def test_a_lagging_worker_delays_nothing():
    lanes = Lanes()
    fast, slow = attach(lanes, 0), attach(lanes, 1)
    answer(lanes, fast, 0.02)
    answer(lanes, slow, 0.2)
    busy_until(slow, 9.0)
    busy_until(fast, 3.0)
    assert lanes.free_in(1.0) == 2.0
