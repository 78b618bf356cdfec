"""Workers outlive the forkserver, which is replaced; processes that models fork do not."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

import inferpool.workers.host.forked
import inferpool.workers.host.forkserver
from inferpool.service.tools.trial.processes import is_alive
from inferpool.workers.arena import Arena
from inferpool.workers.errors import WorkerLostError, WorkerStartError
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.host.forkserver import Forkserver
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.orphans import Orphans
from tests.workers.contract import (
    answers,
    config_of,
    pid_of,
    started,
    suspend,
    until,
    until_begun,
)
from tests.workers.inside.test_group import PairEngine

pytestmark = pytest.mark.measures


@pytest.fixture
def pair_engine(arena: Arena):
    return PairEngine(arena)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.forkserver, "_LOOK_S", 0.1)


def forkserver_of(engine: LocalEngine) -> Forkserver:
    assert engine._forkserver is not None
    return engine._forkserver


async def test_worker_outlives_the_forkserver_and_starts_wait_for_the_next_one(
    pair_engine: PairEngine, put
):
    worker = await started(pair_engine)
    batch = worker.run([put({"n": 1, "do": "sleep"})])
    await until_begun(worker)
    forkserver = forkserver_of(pair_engine)
    first = forkserver.pid
    os.kill(first, signal.SIGKILL)
    assert answers(await batch) == [2]
    await until(lambda: forkserver.pid != first)
    stages: list[str] = []
    other = await pair_engine.start(WorkerId(model="m", slot=1), config_of(), stages.append)
    assert stages[0] == "importing torch"
    assert answers(await other.run([put({"n": 2})])) == [4]
    with pytest.raises(WorkerLostError, match="SIGSEGV") as lost:
        await worker.run([put({"n": 3, "do": "segfault"})])
    assert lost.value.started
    assert (await worker.wait()).was_at_work
    await other.stop(5)


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_forkserver_that_does_not_answer_is_replaced_and_the_start_succeeds(
    pair_engine: PairEngine, put, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
):
    monkeypatch.setattr(inferpool.workers.host.forkserver, "_ANSWER_S", 2.0)
    if not is_noticed:  # it does not answer for another reason
        monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_SLEEPING)

    await (await started(pair_engine)).stop(5)
    forkserver = forkserver_of(pair_engine)
    first = forkserver.pid
    os.kill(first, signal.SIGSTOP)
    worker = await started(pair_engine)
    assert forkserver.pid != first
    assert answers(await worker.run([put({"n": 2})])) == [4]
    await worker.stop(5)


async def test_starts_in_flight_survive_the_forkserver(pair_engine: PairEngine):
    await (await started(pair_engine)).stop(5)
    forkserver = forkserver_of(pair_engine)
    first = forkserver.pid
    starts = [asyncio.create_task(started(pair_engine)) for _ in range(3)]
    await until(lambda: forkserver.process.has_unanswered)
    os.kill(first, signal.SIGKILL)
    await until(lambda: forkserver.pid != first)
    os.kill(forkserver.pid, signal.SIGKILL)  # while it imports torch
    for worker in await asyncio.gather(*starts):
        await worker.stop(5)


async def test_forkserver_that_does_not_answer_does_not_hold_up_the_end_nor_leave_anything_open(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inferpool.workers.host.local, "EXIT_WAIT_S", 0.5)

    worker = await started(engine)
    await worker.stop(5)
    before = len(os.listdir("/proc/self/fd"))
    suspend(forkserver_of(engine).pid)
    start = asyncio.create_task(started(engine))
    await until(lambda: engine._launches)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    monkeypatch.setattr(inferpool.workers.host.local, "EXIT_WAIT_S", 20.0)
    await engine.close()
    assert not engine._launches
    assert len(os.listdir("/proc/self/fd")) <= before


@contextlib.asynccontextmanager
async def running(modules: list[str], extra: list[str]) -> AsyncIterator[Forkserver]:
    server = Forkserver(modules, extra)
    yield server
    await server.close()
    server.process.end()


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


async def test_forkserver_that_cannot_be_replaced_yet_is_not_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.host.forkserver, "_RETRY_S", 0.01)
    tries: list[int] = []
    async with running([], []) as server:
        await server.ready()
        start = server._start

        def refuse_twice():
            tries.append(1)
            assert not server.vitals().is_ready
            if len(tries) <= 2:
                raise OSError(errno.EMFILE, "no descriptors")
            return start()

        monkeypatch.setattr(server, "_start", refuse_twice)
        server.process.kill()
        await until(lambda: server.vitals().incarnation == 1)
        await server.ready()
        assert len(tries) == 3


async def test_process_without_a_descriptor_to_watch_it_by_leaves_no_zombie(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptors")

    await (await started(engine)).stop(5)
    before = {each.pid for each in psutil.Process().children()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(WorkerStartError):
            await started(engine)
    await until(lambda: {each.pid for each in psutil.Process().children()} <= before)


async def test_exit_that_two_threads_see_at_once_has_one_code(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
):
    await (await started(engine)).stop(5)
    sleeper = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ, setpgroup=0)
    popen = inferpool.workers.host.forked._Popen.__new__(inferpool.workers.host.forked._Popen)
    popen.pid, popen.returncode = sleeper, None
    popen._forkserver = inferpool.workers.host.forkserver.running_forkserver()
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


async def test_forkserver_that_only_crashes_fails_the_starts_that_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "crashing_module.py").write_text("import os, signal; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(inferpool.workers.host.forkserver, "_FIRST_PAUSE_S", 0.01)
    async with running(["crashing_module"], []) as server:
        with pytest.raises(WorkerStartError, match="crashes as it starts: SIGSEGV"):
            await server.ready()


@pytest.mark.parametrize("end", ["SIGKILL", "crash", "stop", "hang"])
async def test_processes_that_a_model_forks_end_with_its_worker(
    engine: LocalEngine, put, tmp_path: Path, end: str
):
    file = tmp_path / "children"

    worker = await started(
        engine,
        source="tests.fault_model:ForkingModel",
        options={"children": str(file)},
        batch_timeout_s=2.0,
    )
    children = [psutil.Process(int(pid)) for pid in file.read_text().split()]
    assert len(children) == 3
    assert answers(await worker.run([put({"n": 2})])) == [4]
    assert all(is_alive(each) for each in children)
    batches = []
    match end:
        case "SIGKILL":
            os.kill(pid_of(worker), signal.SIGKILL)
        case "crash":
            batches.append(worker.run([put({"n": 2, "do": "segfault"})]))
        case "stop":
            await worker.stop(5)
        case "hang":
            batches.append(worker.run([put({"n": 2, "do": "spin"})]))
    await worker.wait()
    await asyncio.gather(*batches, return_exceptions=True)
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


def test_no_folder_is_made_to_start_workers(tmp_path: Path):
    code = (
        "import asyncio, os, tempfile\n"
        "from inferpool.workers.arena import Arena\n"
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
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == "[]\n"
    assert tempfile.gettempdir() != str(tmp_path)
    assert list(tmp_path.iterdir()) == []
