import asyncio
import time

from service.deadlines import TICK_S, Deadlines


def test_things_fall_due_in_their_tick_and_not_before():
    async def go():
        due: list[tuple[str, float]] = []
        deadlines: Deadlines[str] = Deadlines(lambda thing: due.append((thing, time.monotonic())))
        now = time.monotonic()
        deadlines.add("late", now + 0.08)
        deadlines.add("early", now + 0.03)
        tick = deadlines.add("never", now + 0.05)
        deadlines.discard("never", tick)
        await asyncio.sleep(0.15)
        assert [thing for thing, _ in due] == ["early", "late"]
        for (_, at), after_s in zip(due, (0.03, 0.08), strict=True):
            assert 0 <= at - now - after_s < 5 * TICK_S

    asyncio.run(go())


def test_discarding_what_was_due_is_no_error():
    async def go():
        deadlines: Deadlines[str] = Deadlines(lambda thing: None)
        tick = deadlines.add("thing", time.monotonic())
        await asyncio.sleep(0.05)
        deadlines.discard("thing", tick)

    asyncio.run(go())


def test_what_is_far_off_falls_due_on_time_too_unless_it_is_discarded():
    async def go():
        due: list[tuple[str, float]] = []
        deadlines: Deadlines[str] = Deadlines(lambda thing: due.append((thing, time.monotonic())))
        now = time.monotonic()
        moments = {f"after {1 + number / 10:g} s": 1 + number / 10 for number in range(8)}
        for name, after_s in moments.items():
            deadlines.add(name, now + after_s)
        deadlines.discard("never", deadlines.add("never", now + 1.55))
        await asyncio.sleep(1.9)
        assert [thing for thing, _ in due] == list(moments)
        for thing, at in due:
            assert 0 <= at - now - moments[thing] < 5 * TICK_S

    asyncio.run(go())
