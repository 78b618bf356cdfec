"""Compares what all tests of a process share: a test that changes it must take that back.

A later test would otherwise pass or fail by chance. `tests.conftest` restores the environment and
`sys.path` itself.
"""

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

_PR_GET_CHILD_SUBREAPER = 37
"""linux/prctl.h"""
_LIBC = ctypes.CDLL(None)
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXFSZ,
)
"""Signals with a meaning for the service. SIGALRM is that of the tests' timeouts."""
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


def _adopts_orphans() -> object:
    number = ctypes.c_int()
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(number), 0, 0, 0)
    return bool(number.value)


def _handler_of(number: signal.Signals) -> object:
    handler = signal.getsignal(number)
    # A loader of torch sets one with its first process, for good. It looks at its own alone.
    is_of_a_loader = getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
    return signal.SIG_DFL if is_of_a_loader else handler


def _settings_of_torch() -> object:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
    }


def _logs() -> object:
    ours = logging.getLogger("inferpool")
    handlers = [
        each
        for each in (*logging.root.handlers, *ours.handlers)
        if not type(each).__module__.startswith("_pytest.")
    ]
    return logging.root.level, logging.root.manager.disable, ours.level, ours.propagate, handlers


_READERS: Mapping[str, Callable[[], object]] = {
    "adoption of orphans": _adopts_orphans,
    "signal handlers": lambda: {each.name: _handler_of(each) for each in _SIGNALS},
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "working directory": os.getcwd,
    "limits": lambda: [resource.getrlimit(each) for each in _LIMITS],
    "cores": lambda: os.sched_getaffinity(0),
    "places of modules": lambda: (sys.path[:], sys.meta_path[:]),
    "arguments": lambda: sys.argv[:],
    "hooks of errors": lambda: (sys.excepthook, threading.excepthook),
    "garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "interpreter": lambda: (sys.getswitchinterval(), sys.getrecursionlimit()),
    "timeout of sockets": socket.getdefaulttimeout,
    "logs": _logs,
    "torch": _settings_of_torch,
}

_BEGINNINGS = (("torch", None), ("adoption of orphans", False))
"""Values that may change for good: torch was not imported yet, and there was no forkserver."""


class ProcessState:
    """State of this process at one moment. To read it and to compare it takes 40 µs."""

    def __init__(self) -> None:
        self._read = {name: read() for name, read in _READERS.items()}

    def changes(self) -> Iterator[str]:
        """Yield what is not as it was then."""
        for name, read in _READERS.items():
            before, now = self._read[name], read()
            if before == now or (name, before) in _BEGINNINGS:
                continue
            if isinstance(before, dict) and isinstance(now, dict):
                same = {each for each in before if before[each] == now[each]}
                before, now = (
                    {key: value for key, value in either.items() if key not in same}
                    for either in (before, now)
                )
            yield f"{name}: {before} before, {now} now"
