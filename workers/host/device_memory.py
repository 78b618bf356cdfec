"""Tells how much memory of this host and of its GPUs is free, and what processes have of it."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from inferpool.workers.host.engine import WorkerHandle
from inferpool.workers.host.gpus import DriverError, Gpu, in_time
from inferpool.workers.shared.memory import available_bytes

logger = logging.getLogger(__name__)

HOST = "the host"
"""The place of memory that is no GPU's own; the others are UUIDs of GPUs."""


class DeviceMemory:
    """Reads memory by place. It asks the driver, which may take long: call it in a thread."""

    def __init__(self, gpus: Sequence[Gpu], nvml: Any) -> None:
        """Read nothing yet.

        Args:
            gpus: The GPUs of this host. What has no memory of its own uses the host's.
            nvml: The module `pynvml`, or one with its functions.
        """
        self._uuids = [gpu.uuid for gpu in gpus if not gpu.is_unified]
        self._nvml = nvml

    def free(self) -> dict[str, int]:
        """Return the free bytes of each place. GPUs that the driver cannot ask are missing."""

        def read() -> dict[str, int]:
            with self._driver():
                return dict(self._free_of_gpus())

        return {HOST: available_bytes(), **self._asked(read)}

    def used_by(self, worker: WorkerHandle) -> dict[str, int]:
        """Return the bytes that a worker shares with no other process, as far as it is known.

        A worker that has ended has nothing, even if its end was not noticed yet. A container may
        hide the processes of a GPU. Then nothing is known of its memory.
        """
        vitals = worker.vitals()
        pids = [rank.pid for rank in vitals.ranks] or [vitals.pid]
        try:
            owns = [psutil.Process(pid).memory_full_info().uss for pid in pids]
        except psutil.NoSuchProcess:
            return {}
        except (psutil.AccessDenied, ValueError):
            owns = [vitals.rss_bytes]
        if not all(owns):  # it has ended, and nobody has waited for it
            return {}

        def read() -> dict[str, int]:
            with self._driver():
                return self._used_on_gpus(pids)

        return {HOST: sum(owns), **self._asked(read)}

    def _asked(self, read: Any) -> dict[str, int]:
        if not self._uuids:
            return {}
        try:
            found: dict[str, int] = in_time(read)
        except (DriverError, self._nvml.NVMLError) as error:
            logger.warning("the memory of the GPUs is not known: %s", error)
            return {}
        return found

    @contextmanager
    def _driver(self) -> Iterator[None]:
        self._nvml.nvmlInit()
        try:
            yield
        finally:
            self._nvml.nvmlShutdown()

    def _free_of_gpus(self) -> Iterator[tuple[str, int]]:
        for uuid in self._uuids:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                yield uuid, int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free)
            except self._nvml.NVMLError as error:
                logger.warning("the memory of GPU %s is not known: NVML says %s", uuid, error)

    def _used_on_gpus(self, pids: Collection[int]) -> dict[str, int]:
        used: Counter[str] = Counter()
        for uuid in self._uuids:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:  # not supported there, or not permitted
                continue
            used[uuid] += sum(each.usedGpuMemory or 0 for each in processes if each.pid in pids)
        return used
