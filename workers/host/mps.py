"""Whether CUDA's Multi-Process Service runs, which has several processes share a GPU at once.

CUDA itself takes to it: a process that finds the service uses it, and any other shares the GPU by
turns. https://docs.nvidia.com/deploy/mps/
"""

from pathlib import Path

DEFAULT_FOLDER = "/tmp/nvidia-mps"
"""Where CUDA looks for it, unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""
_SOCKET = "control"
_PID_FILE = "nvidia-cuda-mps-control.pid"
"""It takes this away when it ends, but leaves its socket."""
_NAME = "nvidia-cuda-mps"
"""What the kernel keeps of the name of the process: 15 characters."""


def is_mps_running(folder: Path, proc: Path = Path("/proc")) -> bool:
    """Whether the control daemon of a folder runs.

    Args:
        folder: Where its socket lies.
        proc: Where the proc file system is mounted. A daemon that is not to be seen there is taken
            for one outside of this container.
    """
    try:
        pid = int((folder / _PID_FILE).read_text())
    except (OSError, ValueError):
        return False
    if not (folder / _SOCKET).exists():
        return False
    try:
        return (proc / str(pid) / "comm").read_text().startswith(_NAME)
    except OSError:
        return True
