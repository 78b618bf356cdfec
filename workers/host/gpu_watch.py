"""Asks NVML for the state of the GPUs every few seconds, in a thread of the front end.

It is a thread because a failing driver may block a call for seconds, or for ever.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from inferpool.workers.host.engine import GpuHealth
from inferpool.workers.host.error_guard import ErrorGuard
from inferpool.workers.host.gpus import Gpu

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_SILENCE_S = 30.0
"""Seconds without an answer of the driver after which all GPUs count as down."""
_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_UNKNOWN")
_Answer = TypeVar("_Answer")


class GpuWatch:
    """Watch of some GPUs, until `stop`."""

    def __init__(self, gpus: Sequence[Gpu], nvml: Any, *, every_s: float = _EVERY_S) -> None:
        """Store the arguments; ask nothing yet.

        Args:
            gpus: The GPUs.
            nvml: The module `pynvml`.
            every_s: Seconds between two looks.
        """
        self._gpus = gpus
        self._nvml = nvml
        self._every_s = every_s
        self._over = threading.Event()
        self._read: Sequence[GpuHealth] = ()
        """Last states. The thread replaces the whole sequence."""
        self._read_at = time.monotonic()
        self._num_xids: Counter[str] = Counter()
        """Number of errors by the UUID of the whole GPU. Used by the thread only."""
        self._last_xids: dict[str, int] = {}
        self._heard: set[str] = set()
        """UUIDs of whole GPUs with errors that the driver reports."""

    def start(self) -> None:
        """Start the thread, if there are GPUs."""
        if self._gpus:
            threading.Thread(target=self._run, name="watch GPUs", daemon=True).start()

    def stop(self) -> None:
        """End the watch, without waiting for an answer that may never come."""
        self._over.set()

    def vitals(self) -> list[GpuHealth]:
        """Return the last state of each GPU. Any thread may call it."""
        if time.monotonic() - self._read_at >= _SILENCE_S:
            return [self._absent(gpu) for gpu in self._gpus]
        return list(self._read)

    def look(self) -> None:
        """Read the state of each GPU once."""
        self._read = [self._vitals_of(gpu) for gpu in self._gpus]
        self._read_at = time.monotonic()

    def _run(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            logger.warning("the GPUs are not watched: NVML says %s", error)
            return
        try:
            events = self._listen()
            error_guard = ErrorGuard("the watch of the GPUs")
            while not self._over.is_set():
                with error_guard:
                    self._count_xids(events)
                    self.look()
                self._over.wait(self._every_s)
        finally:
            self._nvml.nvmlShutdown()

    def _listen(self) -> object:
        """Subscribe to the driver's critical errors."""
        nvml = self._nvml
        events: object = self._ask(nvml.nvmlEventSetCreate)
        for uuid in {_whole(gpu) for gpu in self._gpus}:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._heard.add(uuid)
            except nvml.NVMLError as error:  # not supported there, or not permitted
                logger.debug("Xid errors of %s are not seen: NVML says %s", uuid, error)
        return events

    def _count_xids(self, events: object) -> None:
        while events is not None:
            event = self._ask(lambda: self._nvml.nvmlEventSetWait_v2(events, 0))
            if event is None:  # there are no more
                return
            self._count_xid(event.device, int(event.eventData))

    def _count_xid(self, handle: object, xid: int) -> None:
        uuid = self._ask(lambda: str(self._nvml.nvmlDeviceGetUUID(handle)))
        logger.error("GPU %s: the driver reports Xid %d", uuid or "of no name", xid)
        if uuid is not None:
            self._num_xids[uuid] += 1
            self._last_xids[uuid] = xid

    def _vitals_of(self, gpu: Gpu) -> GpuHealth:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        except nvml.NVMLError:
            return self._absent(gpu)
        try:
            used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError as error:
            if error.value in [getattr(nvml, name) for name in _LOST]:
                return self._absent(gpu)
            used_bytes = None  # not permitted
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        percent = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return replace(
            self._absent(gpu),
            up=True,
            memory_used_bytes=used_bytes,
            utilization=None if percent is None else percent / 100,
            temperature_c=self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=None if milliwatts is None else milliwatts / 1000,
        )

    def _absent(self, gpu: Gpu) -> GpuHealth:
        return GpuHealth(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            up=False,
            memory_bytes=gpu.memory_bytes,
            memory_used_bytes=None,
            utilization=None,
            temperature_c=None,
            power_w=None,
            xid_errors=self._num_xids[_whole(gpu)] if _whole(gpu) in self._heard else None,
            last_xid=self._last_xids.get(_whole(gpu), 0),
        )

    def _ask(self, question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except self._nvml.NVMLError:  # not supported by this model, not permitted, or nothing yet
            return None


def _whole(gpu: Gpu) -> str:
    """Return the UUID of the whole GPU, also for a slice of it."""
    return gpu.sliced_from or gpu.uuid
