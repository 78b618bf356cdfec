"""What a report says of the machine that it was made on."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path


def machine() -> Mapping[str, object]:
    """Where it was run."""
    return {
        "cpu": _cpu_name(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "kernel": f"Linux {platform.release()}",
        "python": f"Python {platform.python_version()}",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
