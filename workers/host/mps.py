"""Detects CUDA's Multi-Process Service: with it processes compute on a GPU at the same time.

CUDA uses the service by itself if it finds it; without it, processes take turns on the GPU. Source:
https://docs.nvidia.com/deploy/mps/
"""

from pathlib import Path

DEFAULT_FOLDER = "/tmp/nvidia-mps"
"""Folder that CUDA finds it in, unless CUDA_MPS_PIPE_DIRECTORY names another."""
_SOCKET = "control"
_PID_FILE = "nvidia-cuda-mps-control.pid"
"""File that the service removes when it ends, unlike its socket."""
_NAME = "nvidia-cuda-mps"
"""Name of the process, as the kernel cuts it to 15 characters."""


def is_mps_running(folder: Path, proc: Path = Path("/proc")) -> bool:
    """Return True if the control daemon of a folder runs.

    Args:
        folder: Folder with its socket.
        proc: Folder of the proc file system. A daemon that is not found there is
            assumed to run outside of this container.
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
