from types import SimpleNamespace

from service.lanes import Lane, Lanes


def attach(lanes: Lanes, slot: int) -> Lane:
    lanes.attach(SimpleNamespace(id=SimpleNamespace(slot=slot), credit=2))
    return lanes.open[-1]


def test_a_worker_of_which_nothing_is_known_makes_no_other_one_lag():
    lanes = Lanes()
    fast = attach(lanes, 0)
    for _ in range(100):
        fast.batches = [[None]]
        fast.begin(0.0, was_idle=True)
        lanes.learn(fast, 1, 0.02)
    slow = attach(lanes, 1)
    assert lanes.leading == [fast, slow]
    slow.batches = [[None]]
    slow.begin(0.0, was_idle=True)
    lanes.learn(slow, 1, 0.2)
    assert (lanes.leading, lanes.lagging) == ([fast], [slow])
