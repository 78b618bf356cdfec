import random
from dataclasses import dataclass, field
from itertools import pairwise
from math import pi, sin

import pytest

from inferpool.service.tools.place.scaling import BUSY_AFTER_GROWTH, QUIET_S, Demand, Scaling

LOOK_S = 5.0
HOST_PER_S = 200.0
"""Instances that a host computes in a second."""
DAY_S = 86_400.0
MIN_HOSTS, MAX_HOSTS = 2, 30


def scaling_of(num_hosts: int) -> Scaling:
    return Scaling(num_hosts, min_hosts=MIN_HOSTS, max_hosts=MAX_HOSTS)


@dataclass
class Days:
    """A fleet under a day's curve of load, with bursts; hosts come late, and go at once."""

    start_s: float = 150.0
    seed: int = 0
    num_days: float = 3.0
    bursts_per_day: int = 12
    night: float = 300.0
    noon: float = 2600.0
    offered: float = 0.0
    refused: float = 0.0
    host_s: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> "Days":
        chance = random.Random(self.seed)
        bursts = self._bursts(chance)
        scaling, queue, now = scaling_of(0), 0.0, 0.0
        hosts, coming = scaling.wanted, list[float]()
        while now < self.num_days * DAY_S:
            rate = self.rate(now) * chance.gauss(1.0, 0.05) + sum(
                extra for began, ended, extra in bursts if began <= now < ended
            )
            arrived, room = max(rate, 0.0) * LOOK_S, hosts * HOST_PER_S * LOOK_S
            longest_queue = hosts * HOST_PER_S  # a second's worth
            computed = min(queue + arrived, room)
            left = queue + arrived - computed
            refused, queue = max(left - longest_queue, 0.0), min(left, longest_queue)
            self.offered += arrived
            self.refused += refused
            self.host_s += (hosts + len(coming)) * LOOK_S
            now += LOOK_S
            hosts += sum(at <= now for at in coming)
            coming = [at for at in coming if at > now]
            before = scaling.wanted
            demand = Demand(
                num_hosts=hosts,
                offered_per_s=arrived / LOOK_S,
                refused_per_s=refused / LOOK_S,
                busy=computed / room,
                queue_share=queue / longest_queue,
            )
            wanted = scaling.decide(now, demand)
            assert MIN_HOSTS <= wanted <= MAX_HOSTS
            if wanted != before:
                self.changes.append((now, wanted - before))
            if wanted > hosts + len(coming):
                coming += [now + self.start_s] * (wanted - hosts - len(coming))
            while hosts + len(coming) > wanted:
                if coming:
                    coming.pop()
                else:
                    hosts -= 1
        return self

    def rate(self, now: float) -> float:
        wave = (1 - sin(2 * pi * (now / DAY_S + 0.25))) / 2
        return self.night + (self.noon - self.night) * wave

    def _bursts(self, chance: random.Random) -> list[tuple[float, float, float]]:
        num = int(self.bursts_per_day * self.num_days)
        begins = [chance.uniform(0, self.num_days) * DAY_S for _ in range(num)]
        return [
            (at, at + chance.expovariate(1 / 120), chance.uniform(0.2, 0.6) * self.rate(at))
            for at in begins
        ]

    @property
    def num_flaps(self) -> int:
        """Hosts given back and asked for again, or the other way, within ten minutes."""
        return sum(
            later - earlier < 600 and before * after < 0
            for (earlier, before), (later, after) in pairwise(self.changes)
        )

    @property
    def always_enough_s(self) -> float:
        return self.num_days * DAY_S * self.noon / HOST_PER_S / BUSY_AFTER_GROWTH


@pytest.mark.parametrize(("seed", "start_s"), [(0, 30.0), (1, 150.0), (2, 280.0)])
def test_days_with_bursts_cost_few_refusals_no_flapping_and_fewer_hosts(seed: int, start_s: float):
    days = Days(seed=seed, start_s=start_s).run()
    assert days.refused / days.offered < 0.005
    assert days.num_flaps == 0
    assert days.host_s < 0.75 * days.always_enough_s
    assert 10 < len(days.changes) / days.num_days < 60


def test_an_even_load_ends_at_a_number_of_hosts_and_stays_there():
    even = Days(night=1200, noon=1200, bursts_per_day=0, num_days=1).run()
    assert [change for at, change in even.changes if at > DAY_S / 3] == []
    assert 0.45 <= even.offered / even.host_s / HOST_PER_S <= 0.9


def demand(**changes: float) -> Demand:
    told = {"num_hosts": 4, "offered_per_s": 100.0, "refused_per_s": 0.0, "busy": 0.6}
    return Demand(**{**told, "queue_share": 0.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ({"refused_per_s": 1.0}, "1 instances are refused each second"),
        ({"queue_share": 0.3}, "the queue is full to 30%"),
        ({"p99_ratio": 1.2}, "1.2 times the objective"),
        ({"busy": 0.9}, "90% of their time"),
    ],
)
def test_each_sign_of_too_few_hosts_asks_for_one_more_once_it_has_lasted(sign, said):
    scaling = scaling_of(4)
    assert [scaling.decide(now, demand(**sign)) for now in (0.0, 5.0)] == [4, 4]
    assert scaling.decide(10.0, demand(**sign)) > 4
    assert said in scaling.reason


def test_a_burst_shorter_than_a_host_takes_to_come_changes_nothing():
    scaling = scaling_of(4)
    for now in range(0, 600, 5):
        pressed = now % 60 < 10
        assert scaling.decide(float(now), demand(refused_per_s=9.0 if pressed else 0.0)) == 4


def test_no_more_is_asked_for_while_hosts_are_on_their_way_and_would_do():
    scaling = scaling_of(4)
    wanted = [scaling.decide(float(now), demand(busy=0.95)) for now in range(0, 300, 5)]
    assert set(wanted) == {4, 6}
    assert scaling.decide(400.0, demand(busy=0.95, num_hosts=6)) > 6


def test_refusals_of_half_the_load_double_the_hosts_and_without_hosts_nothing_is_concluded():
    for num_hosts, wanted in ((4, 8), (0, 4)):
        scaling = scaling_of(4)
        for now in (0.0, 10.0):
            scaling.decide(now, demand(num_hosts=num_hosts, busy=1.0, refused_per_s=50.0))
        assert scaling.wanted == wanted


def test_idle_hosts_are_given_back_slowly_down_to_the_least():
    scaling = scaling_of(30)
    wanted = [
        scaling.decide(float(now), demand(num_hosts=scaling.wanted, busy=0.0))
        for now in range(0, 20_000, 5)
    ]
    assert wanted[: int(QUIET_S / 5)] == [30] * int(QUIET_S / 5)
    assert wanted[-1] == MIN_HOSTS
    assert max(before - after for before, after in pairwise(wanted)) == 3


def test_hosts_found_at_the_start_are_kept_within_the_bounds():
    assert [scaling_of(num).wanted for num in (0, 7, 99)] == [2, 7, 30]
