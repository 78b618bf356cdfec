"""Workers outlive the forkserver, which is replaced; processes that models fork do not."""

import asyncio
import contextlib
import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import inferpool.workers.host.forked
import inferpool.workers.host.forkserver
from inferpool.service.tools.trial.processes import is_alive
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.forked import ForkedProcess, SpawnedProcess
from inferpool.workers.host.forkserver import (
    Forkserver,
    ForkserverLostError,
    ForkserverPeriods,
)
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.orphans import Orphans
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerLostError, WorkerStartError
from inferpool.workers.shared.guard import HANDLED_SIGNALS
from inferpool.workers.shared.messages import FORKED
from tests.descriptors import num_open
from tests.e2e.forked import run
from tests.workers.contract import (
    PATIENT,
    answers,
    config_of,
    pid_of,
    started,
    suspend,
    until,
    until_begun,
)
from tests.workers.ranks.test_group import PairEngine

QUICK = ForkserverPeriods(look_s=0.05, first_pause_s=0.01, retry_s=0.01)


@pytest.mark.slow
async def test_workers_outlive_the_forkserver_and_starts_in_flight_wait_for_the_next_one(
    arena: Arena, no_process_left: None, put
):
    engine = PairEngine(arena, PATIENT)
    worker = await started(engine)
    batch = worker.run([put({"n": 1, "do": "sleep"})])
    await until_begun(worker)
    assert engine._forkserver is not None
    forkserver = engine._forkserver
    first = forkserver.pid
    os.kill(first, signal.SIGSTOP)  # so that it answers no start
    stages: list[str] = []
    starts = [
        asyncio.create_task(engine.start(WorkerId(model="m", slot=n), config_of(), stages.append))
        for n in (1, 2)
    ]
    await until(lambda: forkserver.process.has_unanswered or forkserver.pid != first)
    forkserver.process.kill()
    assert answers(await batch) == [2]
    await until(lambda: forkserver.pid != first)
    forkserver.process.kill()  # while it imports torch
    others = await asyncio.gather(*starts)
    assert "importing torch" in stages
    for other in others:
        assert answers(await other.run([put({"n": 2})])) == [4]
        await other.stop(5)
    with pytest.raises(WorkerLostError, match="SIGSEGV") as lost:
        await worker.run([put({"n": 3, "do": "segfault"})])
    assert lost.value.started
    assert (await worker.wait()).was_at_work


@contextlib.asynccontextmanager
async def running(
    modules: Sequence[str], extra: Sequence[str], periods: ForkserverPeriods = QUICK
) -> AsyncIterator[Forkserver]:
    server = Forkserver(modules, extra, periods=periods)
    try:
        yield server
    finally:
        await server.close()
        server.process.end()


@contextlib.asynccontextmanager
async def light(
    periods: ForkserverPeriods = QUICK, modules: Sequence[str] = (), *, is_ready: bool = True
) -> AsyncIterator[Forkserver]:
    """Run a forkserver without torch, and use it for all that this process forks."""
    async with running(modules, [], periods) as server:
        if is_ready:
            await server.ready()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inferpool.workers.host.forkserver._Holder, "forkserver", server)
            yield server


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_forkserver_that_does_not_answer_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_noticed: bool
):
    answer_s = 1000.0
    if not is_noticed:  # it does not answer for another reason
        answer_s = 0.5
        monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_SLEEPING)
    async with light(replace(QUICK, answer_s=answer_s)) as server:
        first = server.pid
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(ForkserverLostError):
            await asyncio.to_thread(server.fork, b"", ())
        await until(lambda: server.pid != first)
        await server.ready()
    assert ("the forkserver is stopped: killing it" in caplog.text) == is_noticed


async def test_forkserver_that_does_not_answer_does_not_hold_up_the_end_nor_leave_anything_open(
    arena: Arena,
):
    engine = LocalEngine(arena, replace(PATIENT, give_up_s=0.1))
    async with light(replace(QUICK, look_s=1000.0)) as server:  # nobody replaces it
        before = num_open()
        suspend(server.pid)
        start = asyncio.create_task(started(engine))
        await until(lambda: engine._launches)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await engine.close()
        assert not engine._launches
        assert num_open() <= before


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (FORKED.pack(-errno.EAGAIN), BlockingIOError),
        (b"", ForkserverLostError),
        (FORKED.pack(7)[:-1], ForkserverLostError),
    ],
)
async def test_fork_that_is_refused_or_not_answered_in_full_is_an_error_and_leaves_nothing_open(
    answer: bytes, error: type[Exception]
):
    def act(theirs: socket.socket) -> None:
        _, fds, _, _ = socket.recv_fds(theirs, 1, 10)
        os.write(fds[1], answer)
        for fd in fds:
            os.close(fd)

    async with running([], []) as server:
        await server.ready()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.process, "channel", ours)
            before = num_open()
            acting = asyncio.create_task(asyncio.to_thread(act, theirs))
            with pytest.raises(error):
                await asyncio.to_thread(server.fork, b"body", ())
            await acting
            assert num_open() <= before
        assert not server.process.has_unanswered


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 11)",
        "import _thread, time; _thread.start_new_thread(time.sleep, (60,))",
    ],
)
async def test_forkserver_does_without_an_extra_module_that_makes_forks_unsafe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
):
    (tmp_path / "unfit_module.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running([], ["unfit_module"]) as server:
        await server.ready()
        assert server.vitals().incarnation == 1


@pytest.mark.parametrize(("folder", "num_restarts"), [("installed", 0), ("models", 1)])
async def test_forkserver_does_without_packages_that_import_what_the_models_folder_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, num_restarts: int
):
    for name in ("installed", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shared_name.py").write_text("")
    (tmp_path / "installed" / "some_package.py").write_text("import shared_name")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path / folder)
    async with running([], ["some_package"]) as server:
        await server.ready()
        assert server.vitals().incarnation == num_restarts


async def test_what_packages_draw_random_numbers_from_is_other_in_each_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "drawing_package.py").write_text(
        "import random\n"
        "import numpy as np\n"
        "drawn = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with light(modules=["drawing_package"]):
        for number in range(3):
            process = ForkedProcess(target=_draw, args=(str(tmp_path / f"{number}.drawn"),))
            await asyncio.to_thread(process.start)
            await asyncio.to_thread(process.join)
    lines = [file.read_text().split() for file in tmp_path.glob("*.drawn")]
    assert [len(set(of_one)) for of_one in zip(*lines, strict=True)] == [3, 3, 3]


def _draw(path: str) -> None:
    drawn = importlib.import_module("drawing_package").drawn
    Path(path).write_text(" ".join(str(each.random()) for each in drawn))


PRELOADED = """
import os, torch, inferpool.workers.inside.preload
torch.set_num_threads(3)
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    print(torch.get_num_threads())
"""


def test_a_fork_has_a_pool_of_threads_of_its_own_before_it_has_threads():
    assert run([sys.executable, "-c", PRELOADED], timeout=60).stdout == "1\n"


async def test_forkserver_that_cannot_be_replaced_yet_is_not_ready(monkeypatch: pytest.MonkeyPatch):
    tries: list[int] = []
    async with running([], []) as server:
        await server.ready()
        start = server._start

        def refuse_twice():
            tries.append(1)
            assert server.vitals().state == "starting"
            if len(tries) <= 2:
                raise OSError(errno.EMFILE, "no descriptors")
            return start()

        monkeypatch.setattr(server, "_start", refuse_twice)
        server.process.kill()
        await until(lambda: server.vitals().incarnation == 1)
        await server.ready()
        assert len(tries) == 3


async def test_process_without_a_descriptor_to_watch_it_by_leaves_no_zombie():
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptors")

    async with light():
        before = {each.pid for each in psutil.Process().children()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pidfd_open", refuse)
            with pytest.raises(OSError, match="no descriptors"):
                await asyncio.to_thread(ForkedProcess(target=os.getpid).start)
        await until(lambda: {each.pid for each in psutil.Process().children()} <= before)


def test_exit_that_two_threads_see_at_once_has_one_code(monkeypatch: pytest.MonkeyPatch):
    sleeper = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ, setpgroup=0)
    popen = inferpool.workers.host.forked._Popen.__new__(inferpool.workers.host.forked._Popen)
    popen.pid, popen.returncode = sleeper, None
    popen._forkserver = SimpleNamespace(forget=lambda pid: None)
    other = threading.Thread(target=popen.poll)

    def end_group(pid: int) -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it has waited for the process by now, unless it may not

    monkeypatch.setattr(inferpool.workers.host.forked, "end_group", end_group)
    os.kill(sleeper, signal.SIGKILL)
    assert popen.poll(0) == -signal.SIGKILL
    other.join()
    assert popen.poll() == -signal.SIGKILL


async def test_forkserver_that_does_not_finish_its_imports_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "endless_module.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running(["endless_module"], [], replace(QUICK, import_s=0.1)) as server:
        server.keep()
        await until(lambda: server.vitals().incarnation == 1)
    assert "the forkserver does not finish its imports: killing it" in caplog.text


async def test_workers_come_though_the_forkserver_is_killed_whenever_it_starts(
    monkeypatch: pytest.MonkeyPatch, arena: Arena, no_process_left: None, put, tmp_path: Path
):
    (tmp_path / "endless_module.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    periods = replace(QUICK, first_pause_s=600.0)  # the pause after a crash
    async with light(periods, ["endless_module"], is_ready=False) as server:

        async def strike() -> None:
            while True:
                struck = server.pid
                os.kill(struck, signal.SIGKILL)
                await until(lambda struck=struck: server.pid != struck)
                await asyncio.sleep(0.1)  # the worker needs the core, too

        server.keep()
        striking = asyncio.create_task(strike())
        try:
            worker = await started(LocalEngine(arena, PATIENT))
            assert answers(await worker.run([put({"n": 2})])) == [4]
            assert blocked_in(pid_of(worker)) == set()
            with pytest.raises(WorkerLostError, match="SIGSEGV"):
                await worker.run([put({"n": 3, "do": "segfault"})])
            assert (await worker.wait()).was_at_work
            assert server.vitals().incarnation > 3
            assert not server.is_ready
        finally:
            striking.cancel()


def blocked_in(pid: int) -> set[int]:
    """Return the signals that the main thread of a process blocks."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


async def test_spawned_process_is_not_ended_by_signals_of_its_group_before_it_handles_them():
    async with light():
        process = SpawnedProcess(target=signal.pause)
        process.start()
        assert process.pid is not None
        blocked = blocked_in(process.pid)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert blocked == set(HANDLED_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


async def test_spawned_process_imports_nothing_from_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "socket.py").write_text("raise ImportError('not the socket of Python')")
    monkeypatch.chdir(tmp_path)
    async with light():
        process = SpawnedProcess(target=os._exit, args=(7,))
        process.start()
        process.join(60)
        assert process.exitcode == 7


async def test_forkserver_that_only_crashes_fails_the_starts_that_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "crashing_module.py").write_text("import os, signal; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running(["crashing_module"], []) as server:
        with pytest.raises(WorkerStartError, match="crashes as it starts: SIGSEGV"):
            await server.ready()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGKILL", "stop"])
async def test_processes_that_a_model_forks_end_with_its_worker(
    engine: LocalEngine, put, tmp_path: Path, end: str
):
    file = tmp_path / "children"

    worker = await started(
        engine,
        source="tests.fault_model:ForkingModel",
        options={"children": str(file)},
    )
    children = [psutil.Process(int(pid)) for pid in file.read_text().split()]
    assert len(children) == 3
    assert answers(await worker.run([put({"n": 2})])) == [4]
    assert all(is_alive(each) for each in children)
    if end == "stop":
        await worker.stop(5)
    else:
        os.kill(pid_of(worker), signal.SIGKILL)
    await worker.wait()
    await until(lambda: not any(is_alive(each) for each in children))
    await until(lambda: not any(each.is_running() for each in children))  # no zombie either


def test_orphans_are_waited_for_but_not_those_that_have_an_owner():
    mine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    forgotten = subprocess.Popen([sys.executable, "-c", ""])
    orphans = Orphans()
    orphans.owned.add(mine.pid)
    for each in (mine, forgotten):
        os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    orphans.reap()
    assert psutil.pid_exists(forgotten.pid)  # its owner may come yet
    orphans.reap()
    assert not psutil.pid_exists(forgotten.pid)
    forgotten.wait()
    assert mine.wait() == 3


def test_guest_waits_for_its_own_orphans_alone():
    """Other code of the process may wait for its own children at any time."""
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    ours = subprocess.Popen(command, process_group=0)
    forked = subprocess.Popen(command, process_group=ours.pid)
    users = subprocess.Popen(command)
    orphans = Orphans(is_guest=True)
    orphans.own(ours.pid)
    for each in (ours, forked, users):
        os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    orphans.reap()
    orphans.reap()
    assert not psutil.pid_exists(forked.pid)
    forked.wait()
    assert (ours.wait(), users.wait()) == (3, 3)


def test_orphans_are_adopted_until_the_last_one_no_longer_wants_it():
    code = (
        "import ctypes\n"
        "from inferpool.workers.host.orphans import adopt_orphans\n"
        "def adopts():\n"
        "    number = ctypes.c_int(9)\n"
        "    ctypes.CDLL(None).prctl(37, ctypes.byref(number), 0, 0, 0)\n"
        "    return number.value\n"
        "found = [adopts()]\n"
        "end_first, end_second = adopt_orphans(), adopt_orphans()\n"
        "end_first()\n"
        "found.append(adopts())\n"
        "end_second()\n"
        "found.append(adopts())\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "adopt_orphans()()\n"
        "print(*found, adopts())"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=env, text=True, timeout=240) == "0 1 0 1\n"


@pytest.mark.slow
def test_no_folder_is_made_to_start_workers(tmp_path: Path):
    code = (
        "import asyncio, os, tempfile\n"
        "from inferpool.workers.shared.arena import Arena\n"
        "from tests.workers.contract import started\n"
        "from inferpool.workers.host.local import LocalEngine, start_forkserver\n"
        "start_forkserver()\n"
        "async def go():\n"
        "    worker = await started(LocalEngine(Arena(1 << 20)))\n"
        "    print(os.listdir(tempfile.gettempdir()), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(go())\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.stdout == "[]\n"
    assert tempfile.gettempdir() != str(tmp_path)
    assert list(tmp_path.iterdir()) == []
