"""The forkserver: a process that has imported torch and forks the workers.

It forks a process in between, which forks the worker and exits. So the front end becomes the
worker's parent: the worker outlives the forkserver, and the front end always learns its exit code.
"""

import contextlib
import errno
import gc
import importlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any, NoReturn

from inferpool.workers.shared.guard import HANDLED_SIGNALS, die_with_parent
from inferpool.workers.shared.messages import FORKED, MAX_DESCRIPTORS
from inferpool.workers.shared.threads import spin_briefly

READY = b"r"
_NO_PROCESS = 0


EXIT_UNSAFE = 75
"""Exit code if more packages made forks unsafe (EX_TEMPFAIL of sysexits.h)."""


def main(channel_fd: int, front_end_pid: int, modules: Sequence[str], extra: Sequence[str]) -> None:
    """Import modules, then fork a worker for each message until the front end is gone."""
    for number in HANDLED_SIGNALS:  # only the front end ends this process, by its channel
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    die_with_parent(front_end_pid)
    spin_briefly()
    _import(modules)
    if why := import_packages(extra):
        sys.stderr.write(f"the forkserver does without {', '.join(extra)}: {why}\n")
        os._exit(EXIT_UNSAFE)
    gc.collect()
    sources = generators()
    gc.freeze()  # a collection in a worker would touch, and so copy, the shared pages
    with socket.socket(fileno=channel_fd) as channel:
        try:
            channel.send(READY)
            while True:
                message, fds, _, _ = socket.recv_fds(
                    channel, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    return
                for source in sources:  # or all workers would have the same numbers
                    renew(source)
                _serve(channel, fds)
        except (BrokenPipeError, ConnectionResetError):
            return  # the front end is gone


def import_packages(names: Sequence[str]) -> str:
    """Import what a model will import; return why no process may be forked with that, or ""."""
    num_threads = _num_threads()
    before = set(sys.modules)
    _import(names)
    if _has_own(set(sys.modules) - before):
        return "the models' folder has a module of its own"
    is_safe = _num_threads() <= num_threads and not has_opened_gpu()
    return "" if is_safe else "not safe to be forked"


def _import(names: Sequence[str]) -> None:
    """Import modules, and attributes of modules that are modules imported on first use."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            if attribute and not hasattr(importlib.import_module(module), attribute):
                module = f"{module}.{attribute}"
            importlib.import_module(module)
        except Exception as error:  # the worker that needs it reports more
            sys.stderr.write(f"the forkserver cannot import {module}: {error!r}\n")


def _has_own(names: Iterable[str]) -> bool:
    """Return True if the models' folder has another of these modules: workers look there first."""
    for name in {name.partition(".")[0] for name in names}:
        spec = PathFinder.find_spec(name, [os.getcwd()])
        if spec and spec.origin and spec.origin != getattr(sys.modules.get(name), "__file__", None):
            return True
    return False


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def has_opened_gpu() -> bool:
    """Return True if CUDA was initialised, which does not survive a fork."""
    folder = "/proc/self/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{fd}").startswith("/dev/nvidia"):
                return True
    return False


def generators() -> list[Any]:
    """Return the sources of random numbers that imported packages have made for themselves.

    Those of torch are left out: they begin with the same number in every interpreter, as code that
    makes a `torch.Generator` expects. Each worker seeds torch's own, too.
    """
    kinds: tuple[type, ...] = (random.Random,)
    if numpy_random := sys.modules.get("numpy.random"):
        kinds += (numpy_random.BitGenerator,)
    objects = gc.get_objects()
    types = {id(each): each for each in map(type, objects)}  # some cannot be hashed
    found = {number for number, each in types.items() if issubclass(each, kinds)}
    return [each for each in objects if id(type(each)) in found]


def renew(generator: Any) -> None:
    """Have a source go on with other random numbers, as if it had just been made."""
    if isinstance(generator, random.Random):
        random.Random.seed(generator)
        return
    with contextlib.suppress(Exception):  # of a kind that another package defines
        generator.state = type(generator)().state


def _serve(channel: socket.socket, fds: Sequence[int]) -> None:
    answer = _NO_PROCESS
    try:
        data_r, answer_w, tracker_fd, *inherited = fds
        answer = _fork_twice(channel, data_r, answer_w, tracker_fd, inherited)
    except ValueError as error:  # not all of them could be received
        sys.stderr.write(f"the forkserver has too few descriptors: {error}\n")
    except OSError as error:
        answer = _refusal(error)
    if answer != _NO_PROCESS:
        with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer
            os.write(answer_w, FORKED.pack(answer))
    for fd in fds:
        os.close(fd)


def _fork_twice(
    channel: socket.socket, data_r: int, answer_w: int, tracker_fd: int, inherited: Sequence[int]
) -> int:
    """Fork a worker by a parent that exits at once; return its number, or a negative errno."""
    told_r, told_w = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_leave(channel, (told_r, told_w, answer_w), data_r, tracker_fd, inherited)
        os.close(told_w)
        told_w = -1
        told = os.read(told_r, FORKED.size)
        os.waitpid(between, 0)  # now the front end is the worker's parent
    finally:
        os.close(told_r)
        if told_w >= 0:
            os.close(told_w)
    answer: int = FORKED.unpack(told)[0] if told else _NO_PROCESS
    return answer


def _fork_and_leave(
    channel: socket.socket,
    ours: tuple[int, int, int],
    data_r: int,
    tracker_fd: int,
    inherited: Sequence[int],
) -> NoReturn:
    """Run in the process in between: fork the worker, and leave it to the front end."""
    try:
        try:
            pid = os.fork()
        except OSError as error:
            pid = _refusal(error)
        if pid == 0:
            channel.close()
            for fd in ours:
                os.close(fd)
            _become_worker(data_r, tracker_fd, inherited)
        os.write(ours[1], FORKED.pack(pid))
    finally:
        os._exit(0)


def _refusal(error: OSError) -> int:
    return -(error.errno or errno.EAGAIN)


def _become_worker(data_r: int, tracker_fd: int, inherited: Sequence[int]) -> NoReturn:
    """Run the process object that comes through a pipe, like multiprocessing's own forkserver.

    The other end of the pipe is the lifeline: it stays open as long as this process may live.
    """
    code = 1
    try:
        resource_tracker._resource_tracker._fd = tracker_fd  # type: ignore[attr-defined]  # private
        forkserver._forkserver._inherited_fds = list(inherited)  # type: ignore[attr-defined]  # so
        code = spawn._main(data_r, os.dup(data_r))
    except EOFError:
        pass  # the start was given up
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
