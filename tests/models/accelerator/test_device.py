"""Order of streams, on the simulated accelerator."""

from contextlib import ExitStack

import pytest
import torch

from inferpool.models.accelerator.device import HandOver, SideStream
from inferpool.models.accelerator.order import OwnStream

pytestmark = pytest.mark.simulated

_NUM = 1 << 16


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_a_side_stream_has_made_is_used_only_after_it_is_handed_over(is_taken: bool):
    side, host = SideStream("sim:0"), torch.full((_NUM,), 3.0).pin_memory()
    with side.in_use():
        stream = torch.sim.current_stream()
    here = torch.sim.current_stream()
    assert here != stream
    with torch.sim.held(stream):
        with side.in_use():
            x = host.to("sim:0", non_blocking=True)
            there = side.mark()
        if is_taken:
            there.take([x])
        y = x * 2
        if not is_taken:
            here.synchronize()
    assert (y.cpu() == 6).all() == is_taken


@pytest.mark.parametrize("is_taken", [True, False])
def test_memory_that_was_handed_over_is_not_used_again_too_early(is_taken: bool):
    side, here = SideStream("sim:0"), torch.sim.current_stream()
    with side.in_use():
        x = torch.full((_NUM,), 3.0, device="sim:0")
        there = side.mark()
    there.wait()
    with torch.sim.held(here):
        if is_taken:
            there.take([x])
        y = x * 2
        del x
        with side.in_use():
            other = torch.zeros(_NUM, device="sim:0")
            torch.sim.current_stream().synchronize()
    assert (y.cpu() == 6).all() == is_taken
    del other


def test_time_between_two_moments_is_the_device_s():
    began = HandOver(torch.sim.current_stream())
    torch.sim.busy(20_000)
    done = HandOver(torch.sim.current_stream())
    done.wait()
    assert 0.02 <= done.seconds_since(began) < 10  # seconds, though it may be late


def test_what_was_told_to_a_stream_aside_is_waited_for_though_the_block_raises():
    def fail() -> None:
        stack.enter_context(torch.sim.held())
        raise ValueError("midway")

    torch.sim.synchronize()
    with ExitStack() as stack:
        with pytest.raises(ValueError, match="midway"), OwnStream("sim:0").inserted():
            fail()
        assert not torch.sim.current_stream().query()
