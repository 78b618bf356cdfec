import asyncio
import time
from dataclasses import dataclass

from inferpool.service.queue.deadlines import FAR_S, NO_TICK, TICK_S, Deadlines
from inferpool.workers.messages import ItemRef
from tests.virtual_time import run_in_virtual_time


@dataclass(eq=False)
class Thing:
    name: str
    deadline: float
    tick: int = NO_TICK

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline)


class Bench:
    """Things that wait, and those that were due."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.waiting: list[Thing] = []
        self.due: list[tuple[str, float]] = []
        self.deadlines: Deadlines[Thing] = Deadlines(self._on_due, lambda: self.waiting)

    def add(self, name: str, after_s: float) -> Thing:
        thing = Thing(name, self.now + after_s)
        self.waiting.append(thing)
        self.deadlines.add(thing, self.now)
        return thing

    def discard(self, thing: Thing) -> None:
        self.waiting.remove(thing)
        self.deadlines.discard(thing)

    def check(self, wanted: dict[str, float]) -> None:
        assert [name for name, _ in self.due] == list(wanted)
        for name, at in self.due:
            assert -1e-6 < at - self.now - wanted[name] < TICK_S + 1e-6  # but for rounding

    def _on_due(self, thing: Thing) -> None:
        self.waiting.remove(thing)
        self.due.append((thing.name, time.monotonic()))


def test_things_fall_due_in_their_tick_and_not_before():
    async def go():
        bench = Bench()
        bench.add("late", 0.08)
        bench.add("early", 0.03)
        bench.discard(bench.add("never", 0.05))
        await asyncio.sleep(0.15)
        bench.check({"early": 0.03, "late": 0.08})

    run_in_virtual_time(go())


def test_discarding_what_was_due_is_no_error():
    async def go():
        bench = Bench()
        thing = bench.add("thing", 0)
        await asyncio.sleep(0.05)
        bench.deadlines.discard(thing)

    run_in_virtual_time(go())


def test_what_is_far_off_falls_due_on_time_too_unless_it_is_discarded():
    async def go():
        bench = Bench()
        moments = {f"after {number} s": FAR_S + number for number in (0.01, 0.2, 0.49, 0.51, 0.8)}
        for name, after_s in moments.items():
            bench.add(name, after_s)
        bench.discard(bench.add("never", FAR_S + 0.55))
        await asyncio.sleep(FAR_S + 0.9)
        bench.check(moments)

    run_in_virtual_time(go())


def test_what_comes_while_nothing_waits_any_more_falls_due_too():
    async def go():
        bench = Bench()
        bench.discard(bench.add("gone", FAR_S + 60))
        await asyncio.sleep(0.6)  # by then nothing is looked for any more
        bench.add("next", FAR_S + 0.7)
        await asyncio.sleep(FAR_S + 0.2)
        bench.check({"next": FAR_S + 0.7})

    run_in_virtual_time(go())
