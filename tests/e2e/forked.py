"""Starts `python -m inferpool` by a fork of a process that has imported torch and the service.

Two interpreters that import torch, the service's and its forkserver's, cost four seconds of CPU a
start. What must not depend on a fork starts a command line of its own with `subprocess`: tests of
imports, of memory, of signals while a process starts, and of what is installed.

The process that forks has one thread and has opened nothing. Where that can't be so, as with some
accelerators, all start as command lines do.
"""

import atexit
import contextlib
import errno
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "inferpool")
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_"),
    *("TORCH", "CUDA_", "NVIDIA_", "RAY_"),
)
"""Beginnings of variables that an interpreter or a library reads once, when it is loaded."""
_IMPORTED = (
    "numpy",
    "inferpool.service.app",
    "inferpool.service.cli.main",
    "inferpool.service.cli.serve",
    "inferpool.service.cli.agent",
    "inferpool.service.fronts.fronts",
)
_PRELOAD = "inferpool.workers.inside.preload"
_NUMBER = struct.Struct("q")
_MAX_REQUEST_BYTES = 1 << 18
_MAX_FD = 1 << 16
_READY = b"r"
_START_S = 300.0
"""Seconds to import torch and the service, on a machine that is busy and has cached nothing."""
_RANDOM: list[random.Random] = []
"""All sources of random numbers of the process that forks: each process begins them anew."""


def popen(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ROOT,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start a command as `subprocess.Popen` does; `python -m inferpool` by a fork, if it may be.

    Options that only an interpreter of its own can have, such as `preexec_fn`, rule out the fork.
    """
    command = [str(each) for each in arguments]
    env = {"PYTHONPATH": python_path(), **(os.environ if env is None else env)}
    if tuple(command[: len(COMMAND)]) == COMMAND and options.get("preexec_fn") is None:
        origin = _Origin.running()
        if origin.forks_for(env):
            return _Forked(command, env=env, cwd=cwd, **options)
    return subprocess.Popen(command, env=env, cwd=cwd, **options)


def run(
    arguments: Sequence[str | Path], *, timeout: float, input: str | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command as `subprocess.run` does, with the text of stdout and stderr captured."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with popen(arguments, text=True, **pipes) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def origin_pid() -> int:
    """Return the number of the process that forks the others."""
    return _Origin.running().pid


def python_path() -> str:
    """Return our root and what tests of the simulated accelerator inherit."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(dict.fromkeys(filter(None, os.pathsep.join(paths).split(os.pathsep))))


class _Forked(subprocess.Popen[Any]):
    """A process that another one has forked for us, and waits for on our behalf."""

    def _execute_child(  # type: ignore[override]  # private, and the same from Python 3.11 to 3.13
        self,
        args: Sequence[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | Path,
        env: Mapping[str, str],
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: None,
        gids: None,
        uid: None,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        asked = (executable, preexec_fn, pass_fds, shell, gid, gids, uid)
        assert not any(asked), f"a forked process cannot have {asked}"
        assert (umask, process_group) == (-1, -1), "nor these"
        own = (p2cread, c2pwrite, errwrite)
        streams = [each if each != -1 else inherited for inherited, each in enumerate(own)]
        self._told, told = os.pipe()
        try:
            _Origin.running().ask(
                args[len(COMMAND) :], env, str(cwd), [*streams, told], start_new_session
            )
        except BaseException:
            os.close(self._told)
            raise
        finally:
            os.close(told)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]  # private
        number = self._read()
        if number is None:
            os.close(self._told)
            raise OSError(errno.EAGAIN, "the process that forks has ended, or could not fork")
        self.pid = number
        self._child_created = True

    def _read(self) -> int | None:
        """Return the next number that is told; None if nobody is left to tell one."""
        told = os.read(self._told, _NUMBER.size)
        return _NUMBER.unpack(told)[0] if told else None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._told < 0:
            return self.pid, self.returncode or 0
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        if not poll.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._read()
        os.close(self._told)
        self._told = -1
        if status is None:  # the process that forks has ended, and with it what it knows
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            status = signal.SIGKILL
        return self.pid, status

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        lock = self._waitpid_lock  # type: ignore[attr-defined]  # private; so is the rest
        if self.returncode is None and lock.acquire(blocking=False):  # else another thread waits
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


class _Origin:
    """The process that forks the others, as this process, which starts and ends it, knows it."""

    _only: "_Origin | None" = None

    def __init__(self) -> None:
        self._env = _at_start(os.environ | {"PYTHONPATH": python_path()})
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.forked", str(theirs.fileno())],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": python_path(),
                    "OPENBLAS_NUM_THREADS": "1",  # it starts threads as it is loaded
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._channel.settimeout(_START_S)
        self._forks = self._channel.recv(1) == _READY
        atexit.register(self._end)

    @classmethod
    def running(cls) -> "_Origin":
        """Return the one of this process; start it if there is none."""
        if cls._only is None or cls._only._process.poll() is not None:
            cls._only = cls()
        return cls._only

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    def forks_for(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork is as good as an interpreter that starts with these variables."""
        return self._forks and _at_start(env) == self._env

    def ask(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        fds: Sequence[int],
        leads_session: bool,
    ) -> None:
        """Ask for a new process that runs `inferpool`.

        Args:
            arguments: What follows the command.
            env: All of its variables.
            cwd: The folder that it runs in.
            fds: Its stdin, stdout and stderr, and where its number and exit status are told.
            leads_session: Whether it begins a session of its own.
        """
        request = [list(arguments), dict(env), cwd, leads_session]
        socket.send_fds(self._channel, [json.dumps(request).encode()], fds)

    def _end(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


# From here on all runs in the process that forks, or in one that it has forked.


def _serve(channel: socket.socket) -> list[str]:
    """Fork a process for each request until nobody is left to ask.

    Returns:
        The arguments of `inferpool`, in each new process.

    Raises:
        SystemExit: Nobody asks any more; in this process only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends those who ask, and so this process
    _import()
    is_safe = len(os.listdir("/proc/self/task")) == 1
    channel.send(_READY if is_safe else b"-")
    children: dict[int, tuple[int, int]] = {}  # by pidfd: number, and where its end is told
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != channel.fileno():
                pid, told = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, _NUMBER.pack(os.waitpid(pid, 0)[1]))
                os.close(told)
                continue
            message, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 4)
            if not message:
                raise SystemExit
            *streams, told = fds
            try:
                pid = os.fork()
            except OSError as error:
                sys.stderr.write(f"no process can be forked: {error}\n")
                for fd in fds:
                    os.close(fd)
                continue
            if pid == 0:
                return _become(json.loads(message), streams, told)
            for stream in streams:
                os.close(stream)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)


def _import() -> None:
    import torch

    num_threads = torch.get_num_threads()
    for name in (*_IMPORTED, _PRELOAD):
        importlib.import_module(name)
    # Workers import it once more, with effect; a service by itself never does.
    del sys.modules[_PRELOAD]
    torch.set_num_threads(num_threads)
    gc.collect()
    _RANDOM.extend(each for each in gc.get_objects() if isinstance(each, random.Random))
    gc.freeze()


def _become(request: Sequence[Any], streams: Sequence[int], told: int) -> list[str]:
    """Make this process what a new interpreter would be; return the arguments of `inferpool`."""
    arguments, env, cwd, leads_session = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if leads_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.write(told, _NUMBER.pack(os.getpid()))
    os.closerange(3, _MAX_FD)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    for source in _RANDOM:
        source.seed()
    sys.modules["numpy"].random.seed()
    sys.orig_argv = [*COMMAND, *arguments]
    from inferpool.workers.host import forkserver

    vars(forkserver)["start_interpreter"] = _Forkservers(forkserver.start_interpreter)
    return [str(each) for each in arguments]


class _Forkservers:
    """Starts the forkservers of a service: the first by a fork, while it has a single thread."""

    def __init__(self, start_interpreter: Any) -> None:
        self._start_interpreter = start_interpreter

    def __call__(
        self, channel_fd: int, modules: Sequence[str], extra: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        """Start one."""
        if len(os.listdir("/proc/self/task")) > 1:
            process: subprocess.Popen[bytes] = self._start_interpreter(channel_fd, modules, extra)
            return process
        return _ForkedForkserver([str(channel_fd), *modules, "", *extra])


class _ForkedForkserver(subprocess.Popen[bytes]):
    """The forkserver of a service: a child that it has forked."""

    def _execute_child(self, args: Sequence[str], *_: object) -> None:  # type: ignore[override]
        between = args.index("")
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run_forkserver(int(args[0]), parent, args[1:between], args[between + 1 :])
            finally:
                os._exit(1)
        self._child_created = True


def _run_forkserver(
    channel_fd: int, parent: int, modules: Sequence[str], extra: Sequence[str]
) -> None:
    from inferpool.workers.beside import forkserver_process

    os.setpgid(0, 0)
    faulthandler.unregister(signal.SIGQUIT)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.closerange(3, channel_fd)
    os.closerange(channel_fd + 1, _MAX_FD)
    try:
        forkserver_process.main(channel_fd, parent, modules, extra)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _asks:
        sys.argv[1:] = _serve(_asks)
        _asks.detach()
    runpy._run_module_as_main("inferpool")  # type: ignore[attr-defined]  # as `python -m` does
