"""A pool of workers in this process, without HTTP: the same service as `inferpool serve`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from inferpool.models.spec import Kind, TensorHeader
from inferpool.service.app import assemble, log_quick_checks
from inferpool.service.batch.inputs import BatchAnswer, RunLostError, as_spoken
from inferpool.service.batch.reading import DecodedInput
from inferpool.service.client.contents import ReceivedContent
from inferpool.service.errors import (
    GivenUpError,
    OverloadedError,
    ServiceError,
    StartError,
    UnavailableError,
)
from inferpool.service.queue.pool import Pool
from inferpool.service.service import Service
from inferpool.service.settings.loader import LoadedSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.workers.host.devices import DeviceError, find_host
from inferpool.workers.shared.messages import ContentBlob, ItemRef

_TIMEOUT_S = 3600.0
"""Time for each instance; workers that hang are replaced much sooner."""
_PAUSE_S = 0.05
_PATIENCE_S = 300.0
"""How long to wait until a lost worker is back."""
_BATCHES_AHEAD = 3
"""Batches for each worker: one that it computes, one that it prepares, one that waits."""


class LocalTarget:
    """Computes inputs in the pool of one model."""

    def __init__(
        self, pool: Pool, *, max_queue_length: int, max_pixels: int, parameters: bytes
    ) -> None:
        self._pool = pool
        self._parameters = parameters
        ahead = _BATCHES_AHEAD * len(pool.slots) * pool.dispatcher.max_batch_size
        self.room = max(8, min(ahead, max_queue_length // 2))
        self.max_pixels = max_pixels if _takes_pixels(pool) else None

    async def predict(self, given: DecodedInput) -> BatchAnswer:
        """Compute an input in the pool."""
        kind, headers = self._form(given)
        chunk = given.data
        if given.header is None and not (interface := self._pool.interface).is_usual:
            try:
                kind, chunk = as_spoken(given.input, chunk, interface)
            except ServiceError as error:
                return given.refused(error.code, error.message)
        until = time.monotonic() + _PATIENCE_S
        if not self._pool.dispatcher.arena.can_hold(len(chunk)):
            return given.refused("too_large", "it is larger than the arena (arena_bytes)")
        while True:
            now = time.monotonic()
            ref = ItemRef(
                kind, 0, len(chunk), now + _TIMEOUT_S, headers=headers, parameters=self._parameters
            )
            try:
                result = await self._pool.submit(ref, (chunk,))
            except GivenUpError as error:
                raise RunLostError(error.message) from error
            except (OverloadedError, UnavailableError) as error:
                if now > until:
                    raise RunLostError(error.message) from error
                await asyncio.sleep(_PAUSE_S)
            except ServiceError as error:
                return given.refused(error.code, error.message)
            else:
                value = result.value
                if isinstance(value, ContentBlob):
                    return given.answered(ReceivedContent(value.buffer, value.media_type))
                assert isinstance(value, bytes)
                return given.answered(msgspec.json.decode(value))

    def _form(self, given: DecodedInput) -> tuple[Kind, tuple[TensorHeader, ...]]:
        if given.header is None:
            kind = given.input.kind
            return "bytes" if kind == "npy" else kind, ()
        name, shape = "", given.header.shape
        if inputs := self._pool.inputs:
            name = inputs[0].name
            if len(shape) == len(inputs[0].shape) and shape[0] == 1:
                shape = shape[1:]  # a batch of one, which is this instance
        return "tensors", (TensorHeader(name, given.header.dtype, shape, 0),)


def _takes_pixels(pool: Pool) -> bool:
    """Return whether readers may decode for the workers, with the same result.

    Only workers can decode fast.
    """
    specs = pool.inputs
    workers = [slot.handle for slot in pool.slots if slot.handle is not None]
    return (
        not pool.reads_own_form
        and len(specs) == 1
        and specs[0].dtype == "uint8"
        and specs[0].shape[-1:] == (3,)
        and all(worker.ready.speed.decode == "exact" for worker in workers)
    )


@asynccontextmanager
async def local_target(loaded: LoadedSettings, parameters: bytes) -> AsyncIterator[LocalTarget]:
    """Run a service for the block, and yield the target when its model is ready.

    Raises:
        StartError: It cannot be loaded, or this host has no room for it.
    """
    settings = _own_settings(loaded.settings)
    try:
        host = find_host(settings.cuda_visible_devices, settings.cuda_device_order)
        log_quick_checks(settings, host)
        service = assemble(settings, host, Console(None), loaded.origins).service
    except (DeviceError, OSError) as error:
        raise StartError(str(error)) from error
    service.start()
    try:
        await service.until_settled()
        name = settings.default_model
        pool = service.pools[name]
        if not pool.is_ready:
            raise StartError(f"{name} could not be loaded: {pool.reason}")
        await _until_all(service, pool)
        yield LocalTarget(
            pool,
            max_queue_length=settings.max_queue_length,
            max_pixels=settings.max_image_pixels,
            parameters=parameters,
        )
    finally:
        await service.stop()


def _own_settings(settings: Settings) -> Settings:
    """Return the settings of a service that computes only this run, with one model."""
    name = settings.default_model
    own = {
        "models": {name: settings.models[name]},
        "job_store": "none",  # jobs belong to the service with these settings, which may run
        "watch": None,
        "torchserve": None,  # nor do its addresses
        "sagemaker_models": None,
        "trace_endpoint": None,  # there are no calls
        "grpc_port": None,
        "cluster_port": None,  # this run computes here, with workers of its own
        "speed_search": False,  # it would slow the run, and change presets during it
    }
    return settings.model_copy(update=own)


async def _until_all(service: Service, pool: Pool) -> None:
    """Wait until no worker is starting, so that the run begins at full speed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while any(slot.state == "starting" for slot in pool.slots):
                await service.until_changed()
