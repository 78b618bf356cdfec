import subprocess
import sys

import pytest

from inferpool.workers.inside import process
from inferpool.workers.inside.process import SpareMemory

MIB = 1 << 20

FAULTS = """
import resource, sys
from inferpool.workers.inside.allocator import keep_large_buffers
if sys.argv[1] == "kept":
    assert keep_large_buffers()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number in range(6):
    before = faults()
    bytes(b"x") * (48 << 20)
print(faults() - before)
"""

RETURNED = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from inferpool.workers.inside.allocator import give_back, held_bytes, keep_large_buffers
keep_large_buffers()
def make(num):
    return [np.ones(1 << 17) for _ in range(num)]  # 1 MiB each
with ThreadPoolExecutor(1) as thread:  # as images are prepared
    buffers = thread.submit(make, 50).result()
buffers += make(50)
last = make(1)  # which keeps what lies below it from being trimmed
del buffers
before = held_bytes()
give_back()
print(before - held_bytes())
"""


def run(code, *arguments):
    return int(subprocess.check_output([sys.executable, "-c", code, *arguments], text=True))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_buffers_are_reused_without_page_faults():
    assert run(FAULTS, "left alone") > 1000
    assert run(FAULTS, "kept") < 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_free_memory_between_buffers_in_use_is_returned_to_the_system():
    assert run(RETURNED) > 90 * MIB


@pytest.fixture
def given_back(monkeypatch):
    """How often memory was given back, as a list that grows."""
    times = []
    monkeypatch.setattr(process, "give_back", lambda: times.append(1))
    return times


@pytest.fixture
def hold(monkeypatch):
    """Sets what the process seems to hold."""
    held = {"bytes": 500 * MIB}
    monkeypatch.setattr(process, "held_bytes", lambda: held["bytes"])
    return lambda mib: held.update(bytes=mib * MIB)


def test_an_idle_worker_returns_free_memory_once(given_back, hold):
    spare = SpareMemory(now=0)
    spare.idle(100)
    assert not given_back  # it has not worked yet
    spare.worked(101)
    spare.idle(105)
    assert not given_back
    spare.idle(106)
    spare.idle(107)
    assert len(given_back) == 1
    spare.worked(200)
    spare.idle(206)
    assert len(given_back) == 2


def test_a_busy_worker_returns_the_memory_of_earlier_larger_inputs(given_back, hold):
    spare = SpareMemory(now=0)
    for now in range(30):
        spare.worked(now)
    hold(900)
    for now in range(30, 60):
        spare.worked(now)
    assert len(given_back) == 1


def test_a_busy_worker_keeps_the_memory_that_it_uses(given_back, hold):
    spare = SpareMemory(now=0)
    for now in range(200):
        hold(500 + now)
        spare.worked(now)
    assert not given_back


def test_a_busy_worker_keeps_its_memory_if_inputs_stay_large(given_back, hold):
    spare = SpareMemory(now=0)
    spare.worked(11)
    hold(1500)
    for now in range(20, 300):
        spare.worked(now)
    assert len(given_back) == 1
