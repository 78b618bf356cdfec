"""How the GPUs are, as NVML says it every few seconds, to a thread of the front end.

A thread, since a driver in trouble may hold whoever asks it for seconds, or for good.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from inferpool.workers.host.devices import Gpu
from inferpool.workers.host.keep_going import KeepGoing

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_SILENCE_S = 30.0
"""A driver that has not answered for so long is as good as gone."""
_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_UNKNOWN")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVitals:
    """One GPU, or slice of one, as it is now. What NVML does not say of it is None."""

    index: int
    uuid: str
    name: str
    is_up: bool
    """The driver answers for it."""
    memory_bytes: int
    used_bytes: int | None = None
    """By all processes, ours and others'."""
    utilization: float | None = None
    """The share of the time in which something ran on it."""
    temperature_c: float | None = None
    power_w: float | None = None
    num_xid_errors: int = 0
    """Critical errors that the driver has told of since the service started."""
    last_xid: int = 0
    """Which the last of them was; 0 for none."""


class GpuWatch:
    """Asks for the state of some GPUs until told to stop."""

    def __init__(self, gpus: Sequence[Gpu], nvml: Any) -> None:
        """Ask nothing yet.

        Args:
            gpus: Those to ask for.
            nvml: The module `pynvml`, or what answers as it does.
        """
        self._gpus = gpus
        self._nvml = nvml
        self._over = threading.Event()
        self._read: Sequence[GpuVitals] = ()
        """Replaced by the thread, whole."""
        self._read_at = time.monotonic()
        self._num_xids: Counter[str] = Counter()
        """By the UUID of the whole GPU; the thread's, as is the next."""
        self._last_xids: dict[str, int] = {}

    def start(self) -> None:
        """Begin to ask, if there is any."""
        if self._gpus:
            threading.Thread(target=self._run, name="watch GPUs", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; nobody waits for an answer that may never come."""
        self._over.set()

    def vitals(self) -> list[GpuVitals]:
        """Each GPU as it was last seen; any thread may ask."""
        if time.monotonic() - self._read_at >= _SILENCE_S:
            return [self._absent(gpu) for gpu in self._gpus]
        return list(self._read)

    def look(self) -> None:
        """Ask for each of them once."""
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
            keep_going = KeepGoing("the watch of the GPUs")
            while not self._over.is_set():
                with keep_going:
                    self._count_xids(events)
                    self.look()
                self._over.wait(_EVERY_S)
        finally:
            self._nvml.nvmlShutdown()

    def _listen(self) -> object:
        """Have the driver tell of critical errors."""
        nvml = self._nvml
        events: object = self._ask(nvml.nvmlEventSetCreate)
        for uuid in {_whole(gpu) for gpu in self._gpus}:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError as error:  # not supported there, or not permitted
                logger.debug("Xid errors of %s are not seen: NVML says %s", uuid, error)
        return events

    def _count_xids(self, events: object) -> None:
        while events is not None:
            event = self._ask(lambda: self._nvml.nvmlEventSetWait_v2(events, 0))
            if event is None:  # there is no more
                return
            self._count_xid(event.device, int(event.eventData))

    def _count_xid(self, handle: object, xid: int) -> None:
        uuid = self._ask(lambda: _text(self._nvml.nvmlDeviceGetUUID(handle)))
        logger.error("GPU %s: the driver reports Xid %d", uuid or "of no name", xid)
        if uuid is not None:
            self._num_xids[uuid] += 1
            self._last_xids[uuid] = xid

    def _vitals_of(self, gpu: Gpu) -> GpuVitals:
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
        return GpuVitals(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            is_up=True,
            memory_bytes=gpu.memory_bytes,
            used_bytes=used_bytes,
            utilization=None if percent is None else percent / 100,
            temperature_c=self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=None if milliwatts is None else milliwatts / 1000,
            num_xid_errors=self._num_xids[_whole(gpu)],
            last_xid=self._last_xids.get(_whole(gpu), 0),
        )

    def _absent(self, gpu: Gpu) -> GpuVitals:
        return GpuVitals(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            is_up=False,
            memory_bytes=gpu.memory_bytes,
            num_xid_errors=self._num_xids[_whole(gpu)],
            last_xid=self._last_xids.get(_whole(gpu), 0),
        )

    def _ask(self, question: Callable[[], _Answer]) -> _Answer | None:
        try:
            return question()
        except self._nvml.NVMLError:  # not supported by this model, not permitted, or nothing yet
            return None


def _whole(gpu: Gpu) -> str:
    """The UUID of the GPU, if this is a slice of it."""
    return gpu.sliced_from or gpu.uuid


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
