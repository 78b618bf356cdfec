import asyncio

import pytest

from inferpool.service.telemetry.log_throttle import LogThrottle


@pytest.mark.usefixtures("virtual_time")
async def test_few_lines_are_written_in_a_second_and_the_rest_is_counted():
    counted = asyncio.Queue[int]()
    lines = LogThrottle(counted.put_nowait, most=2)
    assert [lines.may_write() for _ in range(5)] == [True, True, False, False, False]
    assert await asyncio.wait_for(counted.get(), 5) == 3
    assert lines.may_write()  # the next second has begun
    await asyncio.sleep(3)
    assert counted.empty()  # nothing was left out of it
