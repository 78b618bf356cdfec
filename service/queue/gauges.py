"""Reads the gauges of models and their workers, for `/metrics`. Used in the event loop."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from inferpool.service.queue.pool import Pool
from inferpool.service.telemetry.metrics import Reading
from inferpool.workers.host.engine import RankHealth, WorkerHandle
from inferpool.workers.host.slots import State


def read_model_gauges(serving: Pool, pools: Sequence[Pool]) -> Iterator[Reading]:
    """Yield the gauges of a model: of the version that serves, and of all that are loaded."""
    label, dispatcher = serving.name, serving.dispatcher
    for name, value in (
        ("model_version", serving.version),
        ("model_ready", serving.is_ready),
        ("max_queue_length", dispatcher.max_queue_length),
        ("max_batch_size", dispatcher.max_batch_size),
        ("queue_depth", sum(pool.dispatcher.num_queued for pool in pools)),
        ("background_depth", sum(pool.dispatcher.num_background for pool in pools)),
        ("queue_bytes", sum(pool.dispatcher.queued_bytes for pool in pools)),
        ("quarantined_inputs", sum(pool.dispatcher.num_quarantined for pool in pools)),
    ):
        yield Reading(name=name, value=value, labels=(label,))
    states = Counter(slot.state for pool in pools for slot in pool.slots)
    for state in get_args(State):
        yield Reading(name="workers", value=states[state], labels=(label, state))
    for pool in pools:
        yield from _pool_gauges(pool)


def _pool_gauges(pool: Pool) -> Iterator[Reading]:
    for slot in pool.slots:
        labels = (pool.name, slot.id.number)
        placed = (str(slot.config.placement), slot.config.host)
        place = placed if slot.config.host else placed[:1]
        yield Reading(name="worker_up", value=slot.state == "ready", labels=(*labels, *place))
        yield Reading(name="worker_incarnation", value=slot.id.incarnation, labels=labels)
        if slot.handle:
            yield from _worker_gauges(labels, slot.handle)


def _worker_gauges(labels: tuple[str, str], worker: WorkerHandle) -> Iterator[Reading]:
    vitals = worker.vitals()
    speed = worker.ready.speed
    for name, value in (
        ("stalled", worker.is_stalled),
        ("resident_memory_bytes", vitals.rss_bytes),
        ("beat_age_seconds", vitals.last_beat_age_s),
        ("answer_age_seconds", vitals.last_answer_age_s),
        ("batch_age_seconds", vitals.batch_age_s),
    ):
        yield Reading(name=f"worker_{name}", value=value, labels=labels)
    for name, value in (("gain", speed.gain), ("deviation", speed.deviation)):
        yield Reading(name=f"worker_speed_{name}", value=value, labels=(*labels, speed.preset))
    yield from _rank_gauges(labels, vitals.ranks)


def _rank_gauges(labels: tuple[str, str], ranks: Sequence[RankHealth]) -> Iterator[Reading]:
    for rank in ranks:
        named = (*labels, str(rank.rank))
        yield Reading(name="worker_rank_resident_memory_bytes", value=rank.rss_bytes, labels=named)
        if rank.part:
            yield Reading(name="worker_rank_parameter_bytes", value=rank.part_bytes, labels=named)
