"""Builds the report of `/health` from the pools."""

import asyncio
import platform
from collections.abc import Iterable, Sequence
from dataclasses import fields

from inferpool.service.api.routes.health import (
    CheckHealth,
    FrontHealth,
    HealthReport,
    HostStatus,
    InputDescription,
    InterfaceHealth,
    LastEnding,
    ModelHealth,
    SplitHealth,
    TriedSpeedHealth,
    WorkerHealth,
)
from inferpool.service.queue.pool import Pool
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.engine import ForkserverHealth, GpuHealth, Vitals
from inferpool.workers.host.slots import WorkerSlot

_VERSIONS = {name: version_of(name) for name in ("inferpool", "torch")}


def report_of(
    models: Sequence[ModelHealth],
    fronts: Sequence[FrontHealth],
    gpus: Sequence[GpuHealth],
    forkserver: ForkserverHealth | None,
    *,
    is_ready: bool,
    is_draining: bool,
) -> HealthReport:
    """Return the state of the core now; parts add theirs, and then `status_of` sums it up."""
    return HealthReport(
        status="starting",
        ready=is_ready,
        draining=is_draining,
        models=models,
        fronts=fronts,
        gpus=gpus,
        forkserver=forkserver,
        version=_VERSIONS["inferpool"],
        torch=_VERSIONS["torch"],
        python=platform.python_version(),
    )


def is_host_ready(pools: Iterable[Pool]) -> bool:
    """Return whether the host should get requests, unless it is being drained.

    Every model that could be loaded must be ready. A model that was given up for good does not take
    the others out of service, nor does one that loads for the first time while they serve.
    """
    hopeful = [pool for pool in pools if not pool.is_lost]
    return bool(hopeful) and all(pool.is_ready for pool in hopeful)


def status_of(report: HealthReport) -> HostStatus:
    """Return the state of a service in one word."""
    workers = [worker for model in report.models for worker in model.workers]
    if report.draining:
        return "draining"
    if report.ready:
        return "ready" if all(worker.state == "ready" for worker in workers) else "degraded"
    is_first_life = bool(report.models) and all(worker.restarts == 0 for worker in workers)
    return "starting" if is_first_life else "unavailable"


def model_health(name: str, serving: Pool, pools: Sequence[Pool]) -> ModelHealth:
    """Return the state of a model, given its version that serves and all that are loaded."""
    return ModelHealth(
        name=name,
        ready=serving.is_ready,
        reason=serving.reason,
        version=serving.version,
        queue_depth=sum(pool.dispatcher.num_queued for pool in pools),
        inputs=[
            InputDescription(name=each.name, dtype=each.dtype, shape=each.shape)
            for each in serving.inputs
        ],
        example=serving.example,
        reads_own_form=serving.reads_own_form,
        interface=_interface_health(serving),
        check=_check_health(serving),
        restart=serving.replacer.restart,
        workers=[worker_health(slot) for slot in serving.slots],
        other_workers=[
            worker_health(slot) for pool in pools if pool is not serving for slot in pool.slots
        ],
    )


def _interface_health(pool: Pool) -> InterfaceHealth:
    shown = {each.name: getattr(pool.interface, each.name) for each in fields(InterfaceHealth)}
    return InterfaceHealth(**shown)


def _check_health(pool: Pool) -> CheckHealth:
    report = pool.check.report
    if any(slot.config.check == "off" for slot in pool.slots):
        return CheckHealth(state="off")
    if report is None:
        return CheckHealth(state="none")
    return CheckHealth(
        state="warned" if report.warnings else "passed",
        warnings=report.warnings,
        not_checked=report.not_checked,
        declared=report.declared,
    )


def worker_health(slot: WorkerSlot) -> WorkerHealth:
    """Return the state of a worker."""
    vitals = slot.handle.vitals() if slot.handle else None
    speed = slot.handle.ready.speed if slot.handle else None
    split = slot.handle.ready.split if slot.handle else None
    return WorkerHealth(
        name=slot.id.worker,
        host=slot.config.host,
        state=_state(slot, vitals),
        device=str(slot.config.placement),
        incarnation=slot.id.incarnation,
        pid=vitals.pid if vitals else None,
        num_batches=vitals.num_batches if vitals else 0,
        last_beat_age_s=round(vitals.last_beat_age_s, 3) if vitals else None,
        last_answer_age_s=round(vitals.last_answer_age_s, 3) if vitals else None,
        rss_bytes=vitals.rss_bytes if vitals else None,
        restarts=slot.num_restarts,
        placement=slot.config.placement.split or "replicate",
        threads=slot.config.placement.num_threads,
        ranks=vitals.ranks if vitals else [],
        decoders=vitals.decoders if vitals else [],
        split=SplitHealth(cuts=split.cuts, note=split.note) if split else None,
        speed=speed.preset if speed else None,
        speed_gain=round(speed.gain, 2) if speed else None,
        speed_deviation=speed.deviation if speed else None,
        speed_tried=_tried(slot),
        decode=speed.decode if speed else None,
        reason=_reason(slot, vitals),
        last_ending=_last_ending(slot),
    )


def _tried(slot: WorkerSlot) -> list[TriedSpeedHealth]:
    """Return the presets that were tried; a search may know more of them than the worker."""
    speed = slot.config.chosen or (slot.handle.ready.speed if slot.handle else None)
    return [
        TriedSpeedHealth(preset=x.preset, gain=x.gain, deviation=x.deviation, lost=x.lost)
        for x in (speed.tried if speed else ())
    ]


def _state(slot: WorkerSlot, vitals: Vitals | None) -> str:
    if slot.handle and slot.handle.is_stalled:
        return "stalled"
    return "degraded" if slot.state == "ready" and vitals and vitals.failure else slot.state


def _reason(slot: WorkerSlot, vitals: Vitals | None) -> str:
    if slot.state == "ready":
        failure = vitals.failure if vitals else ""
        return f"it failed on a sample of its own: {failure}" if failure else ""
    return slot.stage if slot.state == "starting" else slot.reason


def _last_ending(slot: WorkerSlot) -> LastEnding | None:
    if slot.ended_at is None:
        return None
    age_s = asyncio.get_running_loop().time() - slot.ended_at
    return LastEnding(cause=slot.cause, reason=slot.reason, age_s=round(age_s, 3))
