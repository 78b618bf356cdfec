"""Starts the command `inferpool` as a process that ends with the one that started it.

This runs in the new process before it becomes the command, which stays bound (prctl(2)).
"""

import os
import sys
from collections.abc import Sequence

from inferpool.workers.shared.guard import die_with_parent


def bound_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `inferpool ARGUMENTS` until this process ends in any way.

    It also ends with the thread that starts it, so that thread must last.
    """
    # Like the command itself, -P keeps packages of the current folder from hiding ours.
    return [
        sys.executable,
        "-P",
        "-m",
        "inferpool.service.tools.trial.bound",
        str(os.getpid()),
        *arguments,
    ]


def main() -> None:
    """Bind this process to its parent, and become the command."""
    parent_pid, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "inferpool", *arguments])


if __name__ == "__main__":
    main()
