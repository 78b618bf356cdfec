"""The functions of NVML for simulated devices: a module in the place of `pynvml`.

Memory in use and processes come from the file that SIM_SHARED names, in which every process that
uses a device keeps an account (cpp/ledger.cpp). Without it, nobody seems to use them.
"""

# ruff: noqa: N802, N816  # the names are those of pynvml

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_TOPOLOGY_SYSTEM = 2, 0, 50
NVML_TEMPERATURE_GPU, NVML_DEVICE_MIG_ENABLE = 0, 1
NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 2, 3
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
NVML_ERROR_UNINITIALIZED, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND = 1, 3, 6
NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = 15, 16, 999
nvmlEventTypeXidCriticalError = 8

_SLOT = struct.Struct("<qQ16Q112x")
_NUM_SLOTS = 256
_LOCKS_FROM = (1 << 20) + 1
_users_of_library = 0
"""Calls of `nvmlInit` that no `nvmlShutdown` has undone. Without one, the driver refuses all."""
_files: dict[str, int] = {}
"""Open files by path. They stay open: closing one would drop the locks of this process."""


class NVMLError(Exception):
    """An error of the library, as in pynvml."""

    def __init__(self, value: int = NVML_ERROR_NOT_SUPPORTED) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        """Return the driver's words for it."""
        words = {NVML_ERROR_UNINITIALIZED: "Uninitialized", NVML_ERROR_NOT_FOUND: "Not Found"}
        return words.get(self.value, "Not Supported")


def nvmlInit() -> None:
    """Begin to use the library."""
    global _users_of_library
    _users_of_library += 1


def nvmlShutdown() -> None:
    """End one use of the library."""
    global _users_of_library
    _check_in_use()
    _users_of_library -= 1


def _check_in_use() -> None:
    if not _users_of_library:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)


def nvmlSystemGetDriverVersion() -> str:
    """Return the version of the driver."""
    _check_in_use()
    return "999.0"


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    """Return the newest version that the driver supports."""
    _check_in_use()
    return 13020


def nvmlDeviceGetCount() -> int:
    """Return the number of devices of this host, whatever this process may see."""
    _check_in_use()
    return min(int(os.environ.get("SIM_DEVICES") or 4), 16)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return a handle, which is the device's number."""
    if not 0 <= index < nvmlDeviceGetCount():
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    """Return a UUID that ends with the device's number."""
    return f"GPU-51000000-0000-4000-8000-{handle:012d}"


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> int:
    """Return the handle of a device."""
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    return nvmlDeviceGetHandleByIndex(int(text.rpartition("-")[2]))


def nvmlDeviceGetName(handle: int) -> str:
    """Return the name of a device."""
    return "Simulated accelerator"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    """Return the compute capability."""
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    """Return a device's memory, as all processes use it."""
    total = int(os.environ.get("SIM_CAPACITY_MB") or 1024) << 20
    used = sum(num_bytes[handle] for _, num_bytes in _users(handle))
    return SimpleNamespace(total=total, used=used, free=max(0, total - used))


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    """Return the processes that use a device."""
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=num_bytes[handle])
        for pid, num_bytes in _users(handle)
    ]


def nvmlDeviceGetP2PStatus(one: int, other: int, index: int) -> int:
    """Return that all devices are linked."""
    return NVML_P2P_STATUS_OK


def nvmlDeviceGetTopologyCommonAncestor(one: int, other: int) -> int:
    """Return that all devices are behind one switch."""
    return 10


def _users(number: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the living processes that use a device, with their memory on each device."""
    _check_in_use()
    path = os.environ.get("SIM_SHARED")
    if not path or not os.path.exists(path):
        return
    file = _files.get(path)
    if file is None:
        file = _files[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    slots = os.pread(file, _SLOT.size * _NUM_SLOTS, 0)
    for slot, (pid, used, *num_bytes) in enumerate(_SLOT.iter_unpack(slots)):
        if used >> number & 1 and (pid == os.getpid() or _is_held(file, slot)):
            yield pid, tuple(num_bytes)


def _is_held(file: int, slot: int) -> bool:
    """Return True if the process of a slot is alive: it has locked a byte, until it dies."""
    # struct flock of Linux: type, whence, start, length, pid.
    asked = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, _LOCKS_FROM + slot, 1, 0)
    (found,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return bool(found != fcntl.F_UNLCK)


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def refuse(*_: object) -> Any:
        _check_in_use()
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)

    return refuse
