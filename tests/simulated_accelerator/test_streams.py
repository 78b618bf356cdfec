"""Properties of the simulated accelerator's streams, events and copies."""

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


def test_devices_are_chosen_per_thread():
    torch.sim.set_device(2)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.sim.current_device()))
    thread.start()
    thread.join()
    torch.sim.set_device(0)
    assert found == [0]
