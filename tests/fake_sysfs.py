"""Writes what Linux says of memory nodes and of the PCI bus into a folder of a test."""

from collections.abc import Mapping
from pathlib import Path


def sysfs_of(
    folder: Path, nodes: Mapping[int, str], devices: Mapping[str, tuple[int, str]] | None = None
) -> Path:
    """Return a folder that stands for /sys.

    Args:
        nodes: Cores by the number of their node, in the form of the kernel's lists. Each node has
            8 GiB.
        devices: Node and near cores by NVML's bus ID; -1 for an unknown node.
    """
    sys = folder / "sys"
    files = {}
    for number, cpus in nodes.items():
        node = sys / f"devices/system/node/node{number}"
        files[node / "cpulist"] = cpus
        files[node / "meminfo"] = f"Node {number} MemTotal:       {8 << 20} kB"
    for bus_id, (number, cpus) in (devices or {}).items():
        device = sys / "bus/pci/devices" / bus_id.lower()[4:]
        files[device / "numa_node"] = str(number)
        files[device / "local_cpulist"] = cpus
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return sys
