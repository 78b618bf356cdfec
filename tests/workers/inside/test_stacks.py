import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil
import pytest

import inferpool.workers.inside.stacks
from inferpool.workers.inside.stacks import DUMP_SIGNAL, Stacks, record

CONTEXT = multiprocessing.get_context("spawn")


def stuck_in_c_with_the_gil(fd: int, started) -> None:
    record(fd)
    started.set()
    re.match(r"(a+)+$", "a" * 64 + "b")


def crash(fd: int, started) -> None:
    record(fd)
    started.set()
    os.kill(os.getpid(), signal.SIGSEGV)


def interrupted(fd: int, started) -> None:
    """Write stacks in two parts, like a process that loses its core in between."""

    def write(*_: object) -> None:
        os.write(fd, b"the first part")
        time.sleep(0.5)
        os.write(fd, b" and the rest")

    signal.signal(DUMP_SIGNAL, write)
    started.set()
    time.sleep(600)


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
        assert started.wait(30)
        return process

    yield process_of
    for process in processes:
        process.kill()
        process.join()
        process.close()


@pytest.mark.measures
def test_process_that_holds_the_gil_in_c_still_writes_its_stacks(stacks: Stacks, process_of):
    process = process_of(stuck_in_c_with_the_gil)
    until_it_runs(process)
    began = time.monotonic()
    state, trace = asyncio.run(stacks.ask(process.pid))
    assert time.monotonic() - began < 20
    assert state == "running"
    assert "stuck_in_c_with_the_gil" in trace
    assert process.is_alive()


def test_stacks_that_stop_coming_for_a_moment_are_waited_for(
    stacks: Stacks, process_of, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inferpool.workers.inside.stacks, "_STEP_S", 0.2)
    process = process_of(interrupted)
    assert asyncio.run(stacks.ask(process.pid))[1] == "the first part and the rest"


def until_it_runs(process: BaseProcess) -> None:
    until = time.monotonic() + 20
    while psutil.Process(process.pid).status() != psutil.STATUS_RUNNING:
        assert time.monotonic() < until
        time.sleep(0.01)


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
