"""Statistics of models in Triton's form, which REST and gRPC share.

Field names are those of Triton's statistics extension and of its message `ModelStatistics`. Some of
these numbers are counted for each batch, which costs nothing until something first asks for them.
Runs in the main process's event loop.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from inferpool.service.catalog.catalog import ModelVersion
from inferpool.workers.shared.messages import BatchDone


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationStatistics:
    """How often something was done, and how long it took in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStatistics:
    """Numbers of instances, and the time that each took, summed up."""

    success: DurationStatistics
    """Instances that were answered, with their time in the queue and in their batches."""
    fail: DurationStatistics
    """Instances that failed, were too late, or were given up. The time is not known."""
    queue: DurationStatistics
    compute_input: DurationStatistics
    """Decoding and collating."""
    compute_infer: DurationStatistics
    """The forward pass and rendering."""
    compute_output: DurationStatistics
    """Contained in `compute_infer`."""
    cache_hit: DurationStatistics = DurationStatistics()  # it is frozen
    """There is no cache of answers."""
    cache_miss: DurationStatistics = DurationStatistics()  # it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """Batches of one size since the statistics were first asked for."""

    batch_size: int
    compute_input: DurationStatistics
    compute_infer: DurationStatistics
    compute_output: DurationStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatistics:
    """Statistics of one version of a model since it began to serve; all of them only grow."""

    name: str
    version: str
    last_inference: int
    """When the last batch was answered, in milliseconds of the Unix epoch; 0 if none was. For those
    before the first call to `stats`, it is the time of that call."""
    inference_count: int
    """Instances that were answered."""
    execution_count: int
    """Batches; none are counted for a model that answers in parts."""
    inference_stats: InferenceStatistics
    response_stats: dict[str, object] = field(default_factory=dict)
    """Always empty."""
    batch_stats: Sequence[BatchStatistics] = ()
    memory_usage: Sequence[int] = ()
    """Always empty; `/metrics` has the memory of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsList:
    """Statistics of versions of models."""

    model_stats: Sequence[VersionStatistics]


class BatchCounts:
    """Counts the batches of one version, from now on."""

    def __init__(self, version: ModelVersion) -> None:
        """Begin with what the version has counted up to now, which knows less of batches."""
        metrics = version.metrics
        self.prepare_s = metrics.prepare_duration.sum
        """Each instance's time of preparation, summed up; until now, the batches' instead."""
        self.compute_s = metrics.inference_duration.sum
        self.last_ms = time.time_ns() // 1_000_000 if metrics.succeeded else 0
        self.by_size: dict[int, tuple[int, float, float]] = {}
        """The number of batches, and their seconds of preparation and computation, by size."""
        self.num = int(metrics.batch_size.sum)
        """Instances in all batches."""
        version.pool.dispatcher.observe(self._count)

    def _count(self, num: int, done: BatchDone) -> None:
        times, prepare_s, compute_s = self.by_size.get(num, (0, 0.0, 0.0))
        more = max(done.prepare_s, 0.0), max(done.compute_s, 0.0)
        self.by_size[num] = times + 1, prepare_s + more[0], compute_s + more[1]
        self.num += num
        self.prepare_s += num * more[0]
        self.compute_s += num * more[1]
        self.last_ms = time.time_ns() // 1_000_000


class Statistics:
    """The statistics of all versions of models, as far as something asks for them."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._counts: WeakKeyDictionary[ModelVersion, BatchCounts] = WeakKeyDictionary()

    def of(self, versions: Iterable[ModelVersion]) -> StatisticsList:
        """Return the statistics of some versions."""
        return StatisticsList(model_stats=[self._of_version(each) for each in versions])

    def _of_version(self, version: ModelVersion) -> VersionStatistics:
        counts = self._counts.get(version)
        if counts is None:
            counts = self._counts[version] = BatchCounts(version)
        metrics = version.metrics
        prepare_ns, compute_ns = _ns(counts.prepare_s), _ns(counts.compute_s)
        queue_ns = _ns(metrics.queue_wait.sum)
        num_failed = metrics.failed + metrics.expired + metrics.cancelled
        return VersionStatistics(
            name=version.name,
            version=str(version.number),
            last_inference=counts.last_ms,
            inference_count=metrics.succeeded,
            execution_count=metrics.batch_size.count,
            inference_stats=InferenceStatistics(
                success=DurationStatistics(
                    count=metrics.succeeded, ns=queue_ns + prepare_ns + compute_ns
                ),
                fail=DurationStatistics(count=num_failed),
                queue=DurationStatistics(count=metrics.queue_wait.count, ns=queue_ns),
                compute_input=DurationStatistics(count=counts.num, ns=prepare_ns),
                compute_infer=DurationStatistics(count=counts.num, ns=compute_ns),
                compute_output=DurationStatistics(count=counts.num),
            ),
            batch_stats=[
                BatchStatistics(
                    batch_size=size,
                    compute_input=DurationStatistics(count=num, ns=_ns(prepare_s)),
                    compute_infer=DurationStatistics(count=num, ns=_ns(compute_s)),
                    compute_output=DurationStatistics(count=num),
                )
                for size, (num, prepare_s, compute_s) in sorted(counts.by_size.items())
            ],
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
