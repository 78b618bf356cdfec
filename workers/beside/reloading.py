"""Starts `inferpool serve --debug --reload` anew by forks, so that torch is imported only once.

The process that the user has started imports torch and the service, and no file of the user's. It
forks a process that serves and imports these. When one of them changes, that process ends and the
next one is forked, so no code of the user's is older than its file.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from inferpool.workers.beside.forkserver_process import (
    EXIT_UNSAFE,
    generators,
    has_opened_gpu,
    import_packages,
    renew,
)
from inferpool.workers.shared.guard import die_with_parent

CHANGED = 217
"""Exit status of a process that ends because a file has changed."""
_SIGNAL_STATUS = 128
"""Number that shells add to a signal's for the exit status."""
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_FROM_PROCESS = 0
"""Largest code of a signal (sigaction(2)) that a process has sent, and not the kernel: what a
terminal sends comes to the other process as well."""


def serve_anew(
    serve: Callable[[], int], installed: Sequence[str], packages: Sequence[str] = ()
) -> int:
    """Serve, and again whenever a file has changed; return the exit status.

    Args:
        serve: Serves until a signal or a change, and returns the exit status.
        installed: Beginnings of the paths of files that are not watched.
        packages: Installed packages of the model. A process between imports them once; if it
            cannot be forked after that, each process imports them itself.
    """
    own_files = _times(_own_files(installed))
    if sys.platform != "linux" or has_opened_gpu():
        return _exec_if_changed(serve())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the kernel forgets how processes end
    serve_by_forks = partial(_serve_by_forks, serve, own_files)
    status = EXIT_UNSAFE
    if packages:
        status = _fork(lambda: EXIT_UNSAFE if import_packages(packages) else serve_by_forks())
    if status == EXIT_UNSAFE:
        status = serve_by_forks()
    return _exec_if_changed(status)


def _serve_by_forks(serve: Callable[[], int], own_files: Mapping[Path, int]) -> int:
    """Return `CHANGED` if a file that this process has imported has changed."""
    gc.collect()
    sources = generators()
    gc.freeze()
    while True:
        for source in sources:
            renew(source)
        status = _fork(serve)
        if status != CHANGED or _times(own_files) != own_files:
            return status


def _exec_if_changed(status: int) -> int:
    """Begin this program anew if a file has changed, else return the exit status."""
    if status != CHANGED:
        return status
    return os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _own_files(installed: Sequence[str]) -> list[Path]:
    """Return the files that this process has imported, such as those of a checkout."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return [Path(file) for file in files if file and not file.startswith(tuple(installed))]


def _times(files: Iterable[Path]) -> dict[Path, int]:
    times = {}
    for file in files:
        with contextlib.suppress(OSError):
            times[file] = file.stat().st_mtime_ns
    return times


def _fork(serve: Callable[[], int]) -> int:
    """Serve in another process; pass on signals to it, and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        pid = os.fork()
        if not pid:
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os._exit(serve())
        return _wait_for(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(pid: int) -> int:
    while True:
        came = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if came.si_signo != signal.SIGCHLD:
            if came.si_code <= _FROM_PROCESS:
                os.kill(pid, came.si_signo)
            continue
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            sys.stderr.write(f"inferpool serve: ended by {signal.Signals(-code).name}\n")
        return code if code >= 0 else _SIGNAL_STATUS - code
