import asyncio
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from inferpool.workers.shared.stacks import DUMP_SIGNAL, Stacks, record

CONTEXT = multiprocessing.get_context("spawn")


def stuck_in_c_with_the_gil(fd: int, started) -> None:
    record(fd)
    started.set()
    re.match(r"(a+)+$", "a" * 64 + "b")


def crash(fd: int, started) -> None:
    record(fd)
    started.set()
    os.kill(os.getpid(), signal.SIGSEGV)


def deep(fd: int, started) -> None:
    record(fd)
    for _ in range(2000):
        os.write(fd, b"x" * 100)
    os.write(fd, b"the end")
    started.set()


@pytest.fixture
def stacks():
    stacks = Stacks()
    yield stacks
    stacks.close()


@pytest.fixture
def process_of(stacks: Stacks) -> Iterator:
    processes: list[BaseProcess] = []

    def process_of(target) -> BaseProcess:
        started = CONTEXT.Event()
        process = CONTEXT.Process(target=target, args=(stacks, started))
        process.start()
        processes.append(process)
        assert started.wait(60)
        return process

    yield process_of
    for process in processes:
        process.kill()
        process.join()
        process.close()


def test_process_that_holds_the_gil_in_c_still_writes_its_stacks(stacks: Stacks, process_of):
    process = process_of(stuck_in_c_with_the_gil)
    trace = ""
    while "stuck_in_c_with_the_gil" not in trace:  # a busy machine may give it no time to write
        state, written = asyncio.run(stacks.ask(process.pid))
        trace += written
    assert state in ("running", "sleeping")
    assert process.is_alive()


@pytest.fixture
def deaf() -> Iterator[None]:
    """Have this process ignore the order to write its stacks: the test writes them."""
    before = signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
    yield
    signal.signal(DUMP_SIGNAL, before)


@pytest.mark.usefixtures("virtual_time", "deaf")
@pytest.mark.parametrize(
    ("num_steps", "found"), [(5, "the first part and the rest"), (6, "the first part")]
)
async def test_stacks_that_stop_coming_for_a_moment_are_waited_for(num_steps: int, found: str):
    stacks = Stacks(step_s=1.0)
    asking = asyncio.create_task(stacks.ask(os.getpid()))
    await asyncio.sleep(1.5)
    os.write(stacks._fd, b"the first part")
    await asyncio.sleep(num_steps)
    os.write(stacks._fd, b" and the rest")
    assert (await asking)[1] == found
    stacks.close()


@pytest.mark.usefixtures("virtual_time", "deaf")
async def test_process_that_writes_nothing_is_not_waited_for_for_ever(stacks: Stacks):
    began = asyncio.get_running_loop().time()
    assert (await stacks.ask(os.getpid()))[1] == ""
    assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)


def test_crash_leaves_its_stacks_behind(stacks: Stacks, process_of):
    process = process_of(crash)
    process.join(60)
    trace = stacks.take()
    assert "Segmentation fault" in trace
    assert " in crash\n" in trace
    assert stacks.take() == ""
    assert asyncio.run(stacks.ask(process.pid)) == ("gone", "")


def test_stopped_process_is_not_waited_for(stacks: Stacks, process_of):
    process = process_of(stuck_in_c_with_the_gil)
    os.kill(process.pid, signal.SIGSTOP)
    while True:
        state, trace = asyncio.run(stacks.ask(process.pid))
        if "stopped" in state:  # the signal has arrived
            break
        stacks.take()
    assert trace == ""


def test_a_very_long_dump_keeps_its_begin_and_end(stacks: Stacks, process_of):
    process_of(deep).join(60)
    trace = stacks.take()
    assert len(trace) < 70_000
    assert "\n...\n" in trace
    assert trace.endswith("the end")
