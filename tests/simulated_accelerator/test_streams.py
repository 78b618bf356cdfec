"""Properties of the simulated accelerator's devices, streams, events and copies."""

import threading

import pytest
import torch

pytestmark = pytest.mark.simulated


def test_the_host_does_not_wait_for_an_operation():
    x = torch.ones(256, device="sim")
    torch.sim.synchronize()
    with torch.sim.held():
        y = (x * 2 + 1).relu_()
        assert not torch.sim.current_stream().query()
    torch.sim.synchronize()
    assert torch.sim.current_stream().query()
    assert y.sum().item() == 768


def test_a_copy_to_the_host_that_nobody_waits_for_reads_poison():
    x = torch.full((1000,), 7.0, device="sim")
    torch.sim.synchronize()
    with torch.sim.held():
        out = x.to("cpu", non_blocking=True)
        assert out.is_pinned()
        early = out.clone()
    torch.sim.synchronize()
    assert (early != 7).all()
    assert (out == 7).all()


def test_a_copy_from_pinned_memory_reads_it_late_and_one_from_other_memory_at_once():
    pinned, pageable = torch.ones(64).pin_memory(), torch.ones(64)
    torch.sim.synchronize()
    with torch.sim.held():
        late, at_once = (each.to("sim", non_blocking=True) for each in (pinned, pageable))
        pinned.fill_(5)
        pageable.fill_(5)
    assert (late.cpu() == 5).all()
    assert (at_once.cpu() == 1).all()


def test_registered_memory_is_pinned_until_it_is_given_up():
    memory = torch.ones(3000)
    torch.sim.host_register(memory.data_ptr(), memory.nbytes)
    with pytest.raises(RuntimeError, match="already mapped"):
        torch.sim.host_register(memory[1500:].data_ptr(), 8)
    assert memory.is_pinned()
    with torch.sim.held():
        late = memory[1000:2000].to("sim", non_blocking=True)
        memory.fill_(5)
    torch.sim.host_unregister(memory.data_ptr())
    assert not memory.is_pinned()
    assert (late.cpu() == 5).all()


@pytest.mark.parametrize(("waits", "found"), [(True, 6), (False, 0)])
def test_a_stream_that_does_not_wait_for_another_computes_with_old_numbers(waits, found):
    side, x = torch.Stream("sim:0"), torch.zeros(1000, device="sim")
    torch.sim.synchronize()
    with torch.sim.held():
        x.fill_(3)
        if waits:
            side.wait_stream(torch.sim.current_stream())
        with side:
            y = x * 2
        if not waits:
            side.synchronize()
    side.synchronize()
    with side:
        assert y.cpu()[0] == found


def test_events_measure_the_time_of_a_stream():
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    begin.record()
    torch.sim.busy(30_000)
    with torch.sim.held():
        end.record()
        assert not end.query()
    end.synchronize()
    assert begin.elapsed_time(end) >= 30


def test_an_operator_can_take_time_without_computing():
    x = torch.ones(8, device="sim")
    before = torch.sim.busy_s()
    torch.sim.set_duration_us("aten::neg", 20_000, computes=False)
    try:
        assert (-x).cpu()[0] != -1
    finally:
        torch.sim.set_duration_us("aten::neg", 0)
    assert torch.sim.busy_s() - before >= 0.02
    assert (-x).cpu()[0] == -1


def test_devices_are_chosen_per_thread():
    torch.sim.set_device(2)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.sim.current_device()))
    thread.start()
    thread.join()
    torch.sim.set_device(0)
    assert found == [0]
    with torch.sim.device(3):
        assert torch.ones(1, device="sim").device.index == 3
    with pytest.raises(RuntimeError, match="invalid device"):
        torch.sim.set_device(9)


def test_tensors_of_two_devices_do_not_meet_unless_one_is_copied():
    x = torch.arange(10.0, device="sim:0")
    y = x.to("sim:3")
    assert y.device.index == 3
    assert torch.equal(y.cpu(), torch.arange(10.0))
    for other in (y, torch.ones(10)):
        with pytest.raises(RuntimeError, match="on the same device"):
            x + other
    assert (x + torch.tensor(1.0)).sum().item() == 55


def test_a_copy_between_devices_is_in_the_order_of_both_streams():
    x, y = torch.zeros(100, device="sim:0"), torch.zeros(100, device="sim:1")
    torch.sim.synchronize(0)
    torch.sim.synchronize(1)
    with torch.sim.held(torch.sim.current_stream(0)):
        x.fill_(4)
        y.copy_(x, non_blocking=True)
        z = y + 1
        assert not torch.sim.current_stream(1).query()
    assert (z.cpu() == 5).all()
