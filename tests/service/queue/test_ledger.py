import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest

from inferpool.service.queue.instance import NO_TICK
from inferpool.service.queue.ledger import FAR_S, TICK_S, Deadlines
from inferpool.workers.shared.messages import ItemRef

pytestmark = pytest.mark.usefixtures("virtual_time")


@dataclass(eq=False)
class TimedThing:
    name: str
    deadline: float
    tick: int = NO_TICK

    def __post_init__(self) -> None:
        self.ref = ItemRef("bytes", 0, 0, self.deadline)


class DeadlineBench:
    """Things that wait, and those that were due."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.waiting: list[TimedThing] = []
        self.due: list[tuple[str, float]] = []
        self.deadlines: Any = Deadlines(self._on_due, lambda: self.waiting)  # type: ignore[arg-type, return-value]

    def add(self, name: str, after_s: float) -> TimedThing:
        thing = TimedThing(name, self.now + after_s)
        self.waiting.append(thing)
        self.deadlines.add(thing, self.now)
        return thing

    def discard(self, thing: TimedThing) -> None:
        self.waiting.remove(thing)
        self.deadlines.discard(thing)

    def check(self, wanted: dict[str, float]) -> None:
        assert [name for name, _ in self.due] == list(wanted)
        for name, at in self.due:
            assert -1e-6 < at - self.now - wanted[name] < TICK_S + 1e-6  # but for rounding

    def _on_due(self, thing: TimedThing) -> None:
        self.waiting.remove(thing)
        self.due.append((thing.name, time.monotonic()))


async def test_far_deadlines_fall_due_on_time_unless_discarded():
    bench = DeadlineBench()
    moments = {f"after {number} s": FAR_S + number for number in (0.01, 0.2, 0.49, 0.51, 0.8)}
    for name, after_s in moments.items():
        bench.add(name, after_s)
    bench.discard(bench.add("never", FAR_S + 0.55))
    await asyncio.sleep(FAR_S + 0.9)
    bench.check(moments)


async def test_a_deadline_added_after_the_queue_ran_empty_falls_due():
    bench = DeadlineBench()
    bench.discard(bench.add("gone", FAR_S + 60))
    await asyncio.sleep(0.6)  # by then nothing is looked for any more
    bench.add("next", FAR_S + 0.7)
    await asyncio.sleep(FAR_S + 0.2)
    bench.check({"next": FAR_S + 0.7})
