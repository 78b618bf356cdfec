"""The actor that keeps one host's agent: the only thing that runs in a process of Ray's.

Its methods use only bytes and text, so that the other side unpickles nothing.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess

import psutil

from inferpool.service.tools.trial.bound import bound_command

_ADDED_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Variables that Ray sets for its workers, and that an agent must not inherit. It does inherit
CUDA_VISIBLE_DEVICES, the GPUs reserved for it."""


class Keeper:
    """Runs the agent as its child, which ends with it. Every method returns at once.

    Ray calls all methods, and the constructor, in the main thread of the actor's process. The
    child is bound to that thread.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # only root may; `look` returns the value
            os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
        self._child: subprocess.Popen[bytes] | None = None
        self._order_digest = ""
        self._is_stopping = False
        self._problem = ""

    def start(self, order: bytes) -> None:
        """Start the agent, unless it runs.

        Args:
            order: JSON: the `arguments` of the command `inferpool`, and the variables (`environ`)
                that the agent gets in addition. They hold the cluster's keys, so they are passed in
                a call: Ray keeps what creates an actor, but not calls.
        """
        if self._child is not None and self._child.poll() is None:
            return
        told = json.loads(order)
        self._order_digest = digest(order)
        self._is_stopping, self._problem = False, ""
        try:
            self._child = subprocess.Popen(
                bound_command(told["arguments"]),
                env={**_own_environ(), **told["environ"]},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._child, self._problem = None, f"the agent cannot be started: {error}"

    def stop(self) -> None:
        """Ask the agent to drain and end."""
        self._is_stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def look(self) -> bytes:
        """Return the state of the agent, as JSON with the fields of `KeeperState`."""
        status = self._child.poll() if self._child is not None else None
        return json.dumps(
            {
                "pid": self._child.pid if self._child is not None and status is None else None,
                "exit_status": status,
                "is_stopping": self._is_stopping,
                "problem": self._problem,
                "order": self._order_digest,
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                "python": platform.python_version(),
            }
        ).encode()


def digest(order: bytes) -> str:
    """Return a digest that identifies an order and reveals no keys."""
    return hashlib.sha256(order).hexdigest()[:16]


def _own_environ() -> dict[str, str]:
    """Return the variables of this process, without those that Ray has added for its worker."""
    try:
        raylet = psutil.Process(os.getppid()).environ()
    except psutil.Error:
        raylet = {}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and (name not in _ADDED_BY_RAY or raylet.get(name) == value)
    }
