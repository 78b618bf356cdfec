"""Repairs what tests of the simulated accelerator do to it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _repaired() -> Iterator[None]:
    yield
    module = getattr(torch, "sim", None)  # tests of other things run without it
    for device in range(module.device_count() if module else 0):
        module.revive(device)
        module.set_delay_us(0, device)
        module.set_per_process_memory_fraction(1.0, device)
