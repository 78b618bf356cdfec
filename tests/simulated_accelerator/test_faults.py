"""Faults of the simulated accelerator."""

import os

import pytest
import torch

pytestmark = pytest.mark.simulated


def test_a_lost_device_refuses_everything_and_the_others_do_not():
    x = torch.ones(4, device="sim:1")
    done = torch.Event("sim:1", enable_timing=True)
    done.record(torch.sim.current_stream(1))
    done.synchronize()
    torch.sim.lose(1)
    calls = [
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: torch.sim.synchronize(1),
        lambda: torch.ones(2, device="sim:1"),
        lambda: torch.ones(2).to("sim:1"),
        lambda: torch.sim.mem_get_info(1),
        done.query,
        done.synchronize,
        lambda: done.elapsed_time(done),
    ]
    for call in calls:
        with pytest.raises(torch.AcceleratorError, match="device is lost"):
            call()
    assert (torch.ones(4, device="sim:0") + 1).sum().item() == 8


def test_nobody_waits_for_ever_for_a_lost_device():
    side = torch.Stream("sim:1")
    x = torch.ones(4, device="sim:1")
    done = torch.Event("sim:1")
    with torch.sim.held(torch.sim.current_stream(1)):
        y = x + 1
        done.record(torch.sim.current_stream(1))
        side.wait_event(done)
        torch.sim.lose(1)
    with pytest.raises(torch.AcceleratorError):
        side.synchronize()
    del y


def test_an_operation_that_fails_late_is_reported_by_a_later_call():
    x = torch.ones(4, device="sim")
    torch.sim.synchronize()
    torch.sim.fault_after(1)
    with torch.sim.held():
        y = ((x + 1) + 1) + 1
    with pytest.raises(torch.AcceleratorError, match="illegal memory access") as caught:
        torch.sim.synchronize()
    assert caught.value.error_code == 700
    del y


def test_a_wrong_index_is_an_assert_of_the_device():
    x, wrong = torch.ones(4, device="sim"), torch.tensor([9], device="sim")
    torch.sim.synchronize()
    with torch.sim.held():
        y = x[wrong]
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.sim.synchronize()
    del y


def test_a_fork_of_a_process_that_uses_a_device_may_not_use_it():
    torch.ones(1, device="sim").cpu()
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
