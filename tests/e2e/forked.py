"""Starts Python by a fork of a process that has imported torch and the service.

Two interpreters that import torch, the service's and its forkserver's, cost four seconds of CPU a
start. What must not depend on a fork starts a command line of its own with `subprocess`: tests of
imports, of memory, of signals while a process starts, and of what is installed.

The process that forks has one thread and has opened nothing. Where that can't be so, as with some
accelerators, all start as command lines do.

A command is `python -m inferpool ...`. Any other one is a script: it can ask for forks as well, so
the service that it starts by `inferpool.serve` is forked, too. Commands that start services, such
as `chaos`, have a process of their own that forks these, and ends with the command.
"""

import atexit
import contextlib
import errno
import faulthandler
import fcntl
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from inferpool.workers.shared.guard import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "inferpool")
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_"),
    *("TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "RAY_", "GOMP_", "KMP_"),
)
"""Beginnings of variables that an interpreter or a library reads once, when it is loaded."""
_IMPORTED = (
    "numpy",
    "inferpool.service.app",
    "inferpool.service.cli.main",
    "inferpool.service.cli.serve",
    "inferpool.service.cli.agent",
    "inferpool.service.parts.fronts.fronts",
    "inferpool.service.embedded.serve",
    "inferpool.service.embedded.mounted",
    # Ranks, and processes on a simulated device, import much of this, which takes each a second.
    "inferpool.models.split.dtensors",
)
_STARTS_SERVICES = (
    "inferpool.service.embedded.serve",
    "inferpool.service.tools.trial.processes",
)
"""Modules that start services and agents bound to their process."""
_STARTERS = ("chaos", "doctor", "tune")
"""Commands that start some by them."""
_BOUND = "inferpool.service.tools.trial.bound"
_PRELOAD = "inferpool.workers.inside.preload"
_NUMBER = struct.Struct("q")
_MAX_REQUEST_BYTES = 1 << 18
_MAX_FD = 1 << 16
_MAX_FDS = 12
"""Descriptors that come with a request."""
_CHANNEL = "TESTS_FORKED_CHANNEL"
"""Variable of a process that may ask for forks: the descriptor, and what was read at the start."""
_PATH = "PYTHONPATH"
_READY = b"r"
_START_S = 300.0
"""Seconds to import torch and the service, on a machine that is busy and has cached nothing."""
_END_S = 10.0
"""Seconds for the process that forks to end: a script that was left over keeps it waiting."""
_RANDOM: list[random.Random] = []
"""All sources of random numbers of the process that forks: each process begins them anew."""


def popen(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ROOT,
    num_forkservers: int = 0,
    ends_with_us: bool = False,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start a command as `subprocess.Popen` does, but by a fork if it is Python and may be forked.

    Options that only an interpreter of its own can have, such as `preexec_fn`, rule out the fork.

    Args:
        arguments: The command.
        env: All of its variables.
        cwd: The folder that it runs in.
        num_forkservers: How many forkservers a script may start by forks. It has them as children
            from its start.
        ends_with_us: Whether a fork is killed once this process has ended.
        **options: Other options of `subprocess.Popen`.
    """
    command = [str(each) for each in arguments]
    own = {_PATH: python_path()}
    env = {**os.environ, **own} if env is None else {**own, **env}
    if _is_script(command) and options.get("preexec_fn") is None:
        origin = _Origin.running()
        if origin.forks_for(env):
            return _Forked(
                command,
                env=env,
                cwd=cwd,
                num_forkservers=num_forkservers,
                ends_with_us=ends_with_us,
                **options,
            )
    return subprocess.Popen(command, env=env, cwd=cwd, **options)


@contextlib.contextmanager
def services_forked() -> Iterator[None]:
    """Have services forked that this process starts by `inferpool.serve` during the block."""
    _Origin.running()  # before anybody counts our children
    _start_services_by(_SUBPROCESS)
    try:
        yield
    finally:
        _start_services_by(subprocess)


def shared() -> tuple[dict[str, str], tuple[int, ...]]:
    """Return variables and descriptors with which a child process may start others by forks."""
    origin = _Origin.running()
    return origin.variables(), (origin.channel_fd,)


def read_at_start() -> dict[str, str]:
    """Return the variables that an interpreter must have to be as good as a fork."""
    return _at_start({**os.environ, _PATH: python_path()})


def may_ask() -> bool:
    """Return whether this process was given what it needs to start others by forks."""
    return _CHANNEL in os.environ


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

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_forkservers: int = 0,
        ends_with_us: bool = False,
        **options: Any,
    ) -> None:
        self._num_forkservers = num_forkservers
        self._ends_with_us = ends_with_us
        super().__init__(command, **options)

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
        asked = (executable, preexec_fn, shell, gid, gids, uid)
        assert not any(asked), f"a forked process cannot have {asked}"
        assert (umask, process_group) == (-1, -1), "nor these"
        own = (p2cread, c2pwrite, errwrite)
        streams = [each if each != -1 else inherited for inherited, each in enumerate(own)]
        self._told, told = os.pipe()
        try:
            _Origin.running().ask(
                _Request(
                    arguments=list(args[1:]),
                    env=dict(env),
                    cwd=str(cwd),
                    leads_session=start_new_session,
                    ends_with_us=self._ends_with_us,
                    num_forkservers=self._num_forkservers,
                    passed_fds=sorted(pass_fds),
                ),
                [*streams, told],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request for a new process."""

    arguments: list[str]
    """Words after the name of the interpreter."""
    env: dict[str, str]
    """All of its variables."""
    cwd: str
    leads_session: bool
    """True if it begins a session of its own."""
    ends_with_us: bool
    """True if it is killed when the one that asked for it has ended."""
    num_forkservers: int
    passed_fds: list[int]
    """Descriptors that it inherits."""

    @property
    def is_command(self) -> bool:
        """Return whether it is `inferpool`, which cannot use the channel of the one that asks."""
        return tuple(self._words[:2]) == COMMAND[1:]

    @property
    def starts_services(self) -> bool:
        """Return whether it is a command that starts services."""
        return self.is_command and self._words[2:3] in [[each] for each in _STARTERS]

    @property
    def _words(self) -> list[str]:
        return self.arguments[1:] if self.arguments[0] == "-P" else self.arguments


class _Origin:
    """The process that forks the others, as a process knows it that asks for forks."""

    _only: "_Origin | None" = None

    def __init__(
        self,
        channel: socket.socket,
        env: dict[str, str],
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Take the channel to it, what an interpreter must have read, and it if we started it."""
        self._channel = channel
        self._env = env
        self._process = process
        self._channel.settimeout(_START_S)
        self._forks = process is None or self._channel.recv(1) == _READY

    @classmethod
    def running(cls) -> "_Origin":
        """Return the one of this process; start it if there is none."""
        only = cls._only
        if only is None or (only._process is not None and only._process.poll() is not None):
            cls._only = only = cls._inherited() if may_ask() else cls._started()
        return only

    @classmethod
    def _inherited(cls) -> "_Origin":
        fd, env = json.loads(os.environ.pop(_CHANNEL))  # our children do not inherit the channel
        return cls(socket.socket(fileno=fd), env)

    @classmethod
    def _started(cls) -> "_Origin":
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
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
        origin = cls(channel, read_at_start(), process)
        atexit.register(origin._end, process)
        return origin

    @property
    def pid(self) -> int:
        """Process number."""
        assert self._process is not None, "another process has started it"
        return self._process.pid

    @property
    def channel_fd(self) -> int:
        """Descriptor of the channel for requests."""
        return self._channel.fileno()

    def variables(self) -> dict[str, str]:
        """Return the variables of a process that inherits the channel, with what it is to have."""
        if not self._forks:
            return self._env
        return {**self._env, _CHANNEL: json.dumps([self.channel_fd, self._env])}

    def forks_for(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork is as good as an interpreter that starts with these variables."""
        ours, theirs = self._env, _at_start(env)
        folders, more = (set(each.get(_PATH, "").split(os.pathsep)) for each in (ours, theirs))
        return (
            self._forks
            and {**theirs, _PATH: ""} == {**ours, _PATH: ""}
            and folders <= more
            and not any(Path(each, "sitecustomize.py").exists() for each in more - folders)
        )

    def ask(self, request: _Request, fds: Sequence[int]) -> None:
        """Ask for a new process.

        Args:
            request: What it is to be.
            fds: Its stdin, stdout and stderr, and where its number and exit status are told.
        """
        env = dict(request.env)
        env.pop(_CHANNEL, None)
        passed = list(request.passed_fds)
        if not request.is_command:
            env[_CHANNEL] = self.variables()[_CHANNEL]
            passed = sorted({*passed, self.channel_fd})
        message = json.dumps(asdict(replace(request, env=env, passed_fds=passed))).encode()
        socket.send_fds(self._channel, [message], [*fds, *passed])

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        self._channel.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_script(command: Sequence[str]) -> bool:
    """Return whether a command is Python that runs a module, a text or a file."""
    if not command or command[0] != sys.executable:
        return False
    first = command[1:2]
    return first in (["-m"], ["-c"]) or bool(first and not first[0].startswith("-"))


def _start_services_by(module: object) -> None:
    """Have another module in the place of `subprocess` where services are started."""
    for name in _STARTS_SERVICES:
        vars(importlib.import_module(name))["subprocess"] = module


def _popen_bound(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a service that ends with this process, by a fork if it may be."""
    before, after = list(command[:4]), list(command[5:])
    is_bound = before == [sys.executable, "-P", "-m", _BOUND]
    if not is_bound or not _Origin.running().forks_for(options["env"]):
        return subprocess.Popen(command, **options)
    return _Forked(
        [sys.executable, "-P", *COMMAND[1:], *after], cwd=os.getcwd(), ends_with_us=True, **options
    )


_SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": _popen_bound})


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


# From here on all runs in the process that forks, or in one that it has forked.


def _serve(channel: socket.socket) -> list[str]:
    """Import all, and fork a process for each request; see `_fork_for_each`."""
    _import()
    is_safe = len(os.listdir("/proc/self/task")) == 1
    channel.send(_READY if is_safe else b"-")
    return _fork_for_each(channel)


def _fork_for_each(channel: socket.socket, *, die_with_us: bool = False) -> list[str]:
    """Fork a process for each request until nobody is left to ask.

    Args:
        channel: Where requests come.
        die_with_us: Whether the new processes end with this one, however that ends.

    Returns:
        What follows the name of the interpreter, in each new process.

    Raises:
        SystemExit: Nobody asks any more; in this process only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends those who ask, and so this process
    own_pid = os.getpid()
    children: dict[int, tuple[int, int]] = {}  # by pidfd: number, and where its end is told
    bound: dict[int, int] = {}  # by where its end is told: number
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in bound:  # nobody listens any more
                os.kill(bound.pop(fd), signal.SIGKILL)
                poll.unregister(fd)
                continue
            if fd != channel.fileno():
                if fd not in children:
                    continue
                pid, told = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, _NUMBER.pack(os.waitpid(pid, 0)[1]))
                if bound.pop(told, None) is not None:
                    poll.unregister(told)
                os.close(told)
                continue
            message, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, _MAX_FDS)
            if not message:
                for pid in bound.values():
                    os.kill(pid, signal.SIGKILL)
                raise SystemExit
            request = _Request(**json.loads(message))
            *streams, told = fds[:4]
            try:
                pid = os.fork()
            except OSError as error:
                sys.stderr.write(f"no process can be forked: {error}\n")
                for fd in fds:
                    os.close(fd)
                continue
            if pid == 0:
                if die_with_us:
                    die_with_parent(own_pid)
                return _become(request, streams, told, fds[4:])
            for each in (*streams, *fds[4:]):
                os.close(each)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)
            if request.ends_with_us:
                bound[told] = pid
                poll.register(told, 0)  # of errors, which always count: its reader is gone


def _import() -> None:
    import torch

    num_threads = torch.get_num_threads()
    for name in (*_IMPORTED, "inferpool.workers.inside.process"):
        importlib.import_module(name)
    # Workers import it once more, with effect; a service by itself never does.
    with mock.patch("os.register_at_fork"):
        importlib.import_module(_PRELOAD)
    del sys.modules[_PRELOAD]
    torch.set_num_threads(num_threads)
    gc.collect()
    _RANDOM.extend(each for each in gc.get_objects() if isinstance(each, random.Random))
    gc.freeze()


def _become(
    request: _Request, streams: Sequence[int], told: int, passed: Sequence[int]
) -> list[str]:
    """Make this process what a new interpreter would be; return what follows its name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    if request.leads_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.write(told, _NUMBER.pack(os.getpid()))
    first_free = max([2, *passed, *request.passed_fds]) + 1
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, first_free) for each in passed]
    os.closerange(3, first_free)
    for copy, target in zip(copies, request.passed_fds, strict=True):
        os.dup2(copy, target)
    os.closerange(first_free, _MAX_FD)
    folders = os.environ[_PATH].split(os.pathsep)
    sys.path[1 : 1 + len(folders)] = request.env[_PATH].split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    for source in _RANDOM:
        source.seed()
    sys.modules["numpy"].random.seed()
    sys.orig_argv = [sys.executable, *request.arguments]
    from inferpool.workers.host import forkserver

    if request.is_command:
        vars(forkserver)["start_interpreter"] = _Forkservers(forkserver.start_interpreter)
        if request.starts_services and (of_another := _offer_forks()) is not None:
            return of_another
        return request.arguments
    spares = [_Spare() for _ in range(request.num_forkservers)]
    vars(forkserver)["start_interpreter"] = _Spares(forkserver.start_interpreter, spares)
    _start_services_by(_SUBPROCESS)
    return request.arguments


def _offer_forks() -> list[str] | None:
    """Start a child that forks the services of this process, so that they are below it.

    Returns:
        None; in a process that the child has forked, what follows the interpreter's name.
    """
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        channel.close()
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGHUP):  # they end the command, and so all here
            signal.signal(number, signal.SIG_IGN)
        try:
            of_another = _fork_for_each(theirs, die_with_us=True)
        except SystemExit:  # at once: the socket around this was closed when it became a child
            os._exit(0)
        theirs.detach()  # a new process has closed it
        return of_another
    theirs.close()
    _Origin._only = _Origin(channel, _at_start(os.environ))
    _start_services_by(_SUBPROCESS)
    return None


class _Spare:
    """A child that becomes a forkserver when it is asked to."""

    def __init__(self) -> None:
        parent = os.getpid()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        try:
            self._wait(theirs, parent)
        finally:
            os._exit(1)

    def _wait(self, channel: socket.socket, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.channel.close()
        die_with_parent(parent)
        message, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 1)
        if message:
            env, modules, extra = json.loads(message)
            os.environ.clear()
            os.environ.update(env)
            _run_forkserver(fds[0], parent, modules, extra)


class _Spares:
    """Starts the forkservers of a script, as long as there are spares for them."""

    def __init__(self, start_interpreter: Any, spares: Sequence[_Spare]) -> None:
        self._start_interpreter = start_interpreter
        self._spares = list(spares)

    def __call__(
        self, channel_fd: int, modules: Sequence[str], extra: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        """Start one."""
        if self._spares:
            return _SpareForkserver(self._spares.pop(), channel_fd, modules, extra)
        process: subprocess.Popen[bytes] = self._start_interpreter(channel_fd, modules, extra)
        return process


class _SpareForkserver(subprocess.Popen[bytes]):
    """A forkserver that was a spare."""

    def __init__(
        self, spare: _Spare, channel_fd: int, modules: Sequence[str], extra: Sequence[str]
    ) -> None:
        self._spare = spare
        message = json.dumps([dict(os.environ), list(modules), list(extra)])
        socket.send_fds(spare.channel, [message.encode()], [channel_fd])
        spare.channel.close()
        super().__init__(["forkserver"])

    def _execute_child(self, *_: object) -> None:  # type: ignore[override]
        self.pid = self._spare.pid
        self._child_created = True


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


def _run(arguments: Sequence[str]) -> None:
    """Do what a new interpreter does with what follows its name."""
    if arguments[0] == "-P":
        arguments = arguments[1:]
        del sys.path[0]
    else:
        sys.path[0] = os.getcwd()
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv[1:] = arguments[2:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as `python -m` does
        return
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path[0] = ""
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
        return
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    main.__file__ = os.path.abspath(arguments[0])
    exec(compile(Path(arguments[0]).read_bytes(), main.__file__, "exec"), vars(main))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _asks:
        _arguments = _serve(_asks)
        _asks.detach()
    _run(_arguments)
