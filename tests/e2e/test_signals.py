"""Signals at any moment between the start of a service and its end, and what they leave."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import ROOT, running, until

pytestmark = pytest.mark.measures

MOMENTS_S = [0.0, 0.1, 0.35, 0.75, 1.3, 2.2, 3.0]
"""Seconds after the first instruction, from which on SIGTERM is handled."""
PID_1 = ("unshare", "--pid", "--fork", "--kill-child")
TERMINATED = 128 + signal.SIGTERM


def can_be_pid_1() -> bool:
    return shutil.which("unshare") is not None and not subprocess.call(
        [*PID_1, "true"], stderr=subprocess.DEVNULL
    )


def handles_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1) and "python" in status.partition("\n")[0]


def in_session(leader: int) -> list[psutil.Process]:
    """Return all processes of a session that have not ended."""
    found = []
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == leader and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def exit_code_of(moment_s: float, folder: Path, *, prefix: tuple[str, ...] = ()) -> int:
    """Start a service, send it SIGTERM at a moment, and check that it leaves nothing."""
    folder.mkdir()
    flags = ("--replicas", "1", "--front-ends", "2")
    command = (*prefix, sys.executable, "-m", "inferpool")
    env = {"TMPDIR": str(folder)}
    with running("echo", *flags, command=command, env=env, ready=False, forks=False) as service:
        leader = pid = service.process.pid
        if prefix:
            until(lambda: psutil.Process(leader).children())
            (pid,) = [each.pid for each in psutil.Process(leader).children()]
        until(lambda: handles_sigterm(pid))
        time.sleep(moment_s)
        os.kill(pid, signal.SIGTERM)
        code = service.wait()
        until(lambda: not in_session(leader), 20)
        assert list(folder.iterdir()) == []
        return code


def test_sigterm_at_any_moment_of_the_start_ends_it_and_leaves_nothing(tmp_path: Path):
    with ThreadPoolExecutor(3) as pool:
        folders = [tmp_path / str(moment_s) for moment_s in MOMENTS_S]
        codes = list(pool.map(exit_code_of, MOMENTS_S, folders))
    assert {code for code in codes if code not in (0, TERMINATED)} == set(), codes
    assert TERMINATED in codes


def test_a_signal_ends_the_start_though_an_import_wraps_its_exception_in_another():
    """Python 3.11 does so where a class is being made."""
    code = """if True:
        import os, signal, sys, types
        from inferpool.__main__ import main

        class Named:
            def __set_name__(self, owner, name):
                os.kill(os.getpid(), signal.SIGTERM)

        name = "inferpool.service.cli.main"
        cli = sys.modules[name] = types.ModuleType(name)
        cli.run = lambda: type("Owner", (), {"name": Named()})
        sys.exit(main())
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (TERMINATED, "")


def test_start_that_blocks_in_a_write_of_c_code_is_ended_by_sigterm():
    command = (sys.executable, "-X", "importtime", "-m", "inferpool", "serve", "echo")
    flags = ("--log-format", "human", "--port", "0", "--replicas", "1")
    unread, full = os.pipe()
    with subprocess.Popen([*command, *flags], cwd=ROOT, stderr=full) as process:
        until(lambda: handles_sigterm(process.pid))
        filler = os.open(f"/proc/self/fd/{full}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filler, b"x")
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == TERMINATED
    for fd in (unread, full, filler):
        os.close(fd)


def test_start_goes_on_though_libraries_write_more_than_a_pipe_holds():
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it ends soon
        command = (sys.executable, "-v", "-X", "importtime", "-m", "inferpool", "serve", "echo")
        flags = ("--log-format", "json", "--port", str(taken.getsockname()[1]))
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 1
    assert len(done.stderr) > 500_000
    assert "inferpool.service.app" in done.stderr
    assert "in use" in done.stderr


@pytest.mark.skipif(not can_be_pid_1(), reason="needs the right to make a PID namespace")
def test_as_the_first_process_of_a_container_it_loses_no_sigterm(tmp_path: Path):
    for moment_s in (0.0, 1.0):
        code = exit_code_of(moment_s, tmp_path / str(moment_s), prefix=PID_1)
        assert code in (0, TERMINATED)


@pytest.mark.slow
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_sigquit_shows_all_stacks_and_a_hangup_of_the_terminal_drains(fronts: str):
    with running("echo", "--replicas", "1", "--front-ends", fronts, forks=False) as service:
        workers = service.worker_pids()
        pids = {each["pid"] for each in service.get("/health").json()["fronts"]}
        for num, pid in enumerate({service.process.pid, *pids}, 1):
            os.kill(pid, signal.SIGQUIT)
            until(lambda num=num: num_stacks(service.log) == num)
        os.killpg(service.process.pid, signal.SIGQUIT)  # as Ctrl-\\ does
        assert service.worker_pids() == workers
        assert service.get("/health/live").status_code == 200
        os.killpg(service.process.pid, signal.SIGHUP)
        service.wait_for_log("SIGHUP")
        assert service.wait() == 0
    assert [line for line in service.log if line["level"] in ("error", "critical")] == []


def num_stacks(log: list[dict[str, object]]) -> int:
    """Return how many processes have shown the stack of their main thread."""
    return sum("Current thread" in str(line["message"]) for line in log)
