"""Starts the command `inferpool` as a process that ends with the one that wanted it.

Runs in that process before it becomes the command: the kernel's word stays in force (prctl(2)).
"""

import os
import sys
from collections.abc import Sequence

from inferpool.workers.guard import die_with_parent


def bound_command(arguments: Sequence[str]) -> list[str]:
    """What to start for `inferpool ARGUMENTS` to be killed when this process ends, however it does.

    It follows the thread that starts it, which must be one that lasts.
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
    """Tie this process to its parent, and become the command."""
    parent_pid, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "inferpool", *arguments])


if __name__ == "__main__":
    main()
