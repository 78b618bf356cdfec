"""The largest batch, where the service finds it out: it grows while it pays and fits memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.running import Running, faulty, running, until
from tests.gpu.conftest import Devices

MODEL = "tests.gpu.device_models:DeviceFaultModel"
_NUM_CLIENTS, _AT_ONCE = 4, 64
_SETTLED = 30
"""Batches of one size in a row that no trial has: its turns are shorter."""


def served(devices: Devices, forward_s: float, **changes: object):
    options = {"forward_s": forward_s}
    settings = faulty(source=MODEL, devices=devices.named(0), options=options, **changes)
    return running(settings=settings, env={"SIM_CAPACITY_MB": "64"})


@contextmanager
def under_load(service: Running, share: float = 0.0) -> Iterator[None]:
    """Have more asked than batches of the largest size hold; every answer must be right."""
    is_over = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not is_over.is_set():
            answers = service.predict(*({"n": n, "share": share} for n in range(_AT_ONCE)))
            wrong.extend(a for n, a in enumerate(answers) if a.get("twice") != 2 * n)

    threads = [threading.Thread(target=ask) for _ in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not wrong


def largest(service: Running) -> int:
    return int(service.metric('max_batch_size{model="m"}'))


@pytest.mark.slow
def test_batches_grow_where_each_takes_as_long_as_a_smaller_one(devices: Devices):
    with served(devices, forward_s=0.03) as service:
        assert largest(service) == 8
        with under_load(service):
            until(lambda: largest(service) >= 64)


@pytest.mark.slow
def test_batches_grow_no_further_than_memory_goes(devices: Devices):
    with served(devices, forward_s=0.03) as service, under_load(service, share=0.05):
        until(lambda: largest(service) == 32)  # more than twenty do not fit
        service.wait_for_log("inputs of this shape at once", 60)
        since: float | None = None

        def has_settled() -> bool:
            nonlocal since
            num = service.metric('batch_size_count{model="m"}')
            if largest(service) != 16:
                since = None
            elif since is None:
                since = num
            return since is not None and num >= since + _SETTLED

        until(has_settled)
