"""Metrics of TorchServe's handlers: `context.metrics` and `ts.metrics`. Worker processes only.

They are logged in TorchServe's form, `[METRICS]name.unit:value|#dimensions|...`, up to some lines a
second. Times that TorchServe itself takes are left out, since the service measures them.
"""

import enum
import logging
import socket
import time
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

_UNITS: Mapping[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}
_TIMES_OF_TORCHSERVE = ("HandlerTime", "PredictionTime")
_MAX_LINES = 100
_WINDOW_S = 10.0
"""At most this many lines are logged in each window of this many seconds."""
_MAX_METRICS = 1000
"""Metrics of each kind that are remembered for one handler; others are logged all the same."""


class MetricTypes(enum.Enum):
    """Kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension:
    """A dimension of a metric, with its value."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        """Show it as in the log."""
        return f"{self.name}:{self.value}"


class CachingMetric:
    """One metric, which logs each value that it gets."""

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Store a metric's name, unit and dimensions; None stands for any of these."""
        self.metric_name = metric_name
        self.unit = _UNITS.get(unit, unit)
        self.dimension_names = None if dimension_names is None else [*dimension_names]
        self.metric_type = metric_type

    def add_or_update(
        self, value: float | str, dimension_values: Sequence[object] = (), request_id: str = ""
    ) -> None:
        """Log a value, unless it does not fit the metric."""
        names = self.dimension_names
        if names is None:
            names = [f"dimension_{place}" for place in range(len(dimension_values))]
        is_negative = not isinstance(value, str) and value < 0
        if len(dimension_values) != len(names):
            fault = f"it has the dimensions {names}, not values {list(dimension_values)}"
        elif self.metric_type is MetricTypes.COUNTER and is_negative:
            fault = "a counter cannot fall"
        else:
            pairs = zip(names, dimension_values, strict=True)
            shown = ",".join(f"{name}:{each}" for name, each in pairs)
            _log(self, value, shown, request_id)
            return
        logger.error(
            "the handler's metric %s cannot have the value %s: %s",
            self.metric_name,
            value,
            fault,
        )

    def update(
        self, value: float | str, request_id: str = "", dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Log a value with other dimensions, as older handlers do."""
        self.dimension_names = [each.name for each in dimensions]
        self.add_or_update(value, [each.value for each in dimensions], request_id)


class HandlerMetrics:
    """All metrics of a handler: `context.metrics`."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.request_ids: Mapping[int, str] | str | None = None
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Make a metric, in the place of one with this name."""
        return self._added(CachingMetric(metric_name, unit, dimension_names or (), metric_type))

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return a metric; make one that a handler expects to be in TorchServe's `metrics_config`.

        That file is not read: such a metric has any dimensions, and no unit.
        """
        found = self.cache.get(metric_type, {}).get(metric_name)
        return found or self._added(CachingMetric(metric_name, None, None, metric_type))

    def add_metric(
        self,
        name: str,
        value: float | str,
        unit: str | None,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Log a value of any unit."""
        request_id = self._request_id(idx)
        shown = [*(dimensions or ())]
        has = {each.name for each in shown}
        if request_id is not None and "ModelName" not in has:
            shown.append(Dimension("ModelName", self.model_name))
        if "Level" not in has:
            shown.append(Dimension("Level", "Error" if request_id is None else "Model"))
        metric = self.cache.get(metric_type, {}).get(name)
        if metric is None:
            names = [each.name for each in shown]
            metric = self.add_metric_to_cache(name, unit, names, metric_type)
        metric.add_or_update(value, [each.value for each in shown], request_id or "")

    def add_counter(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Count something."""
        self.add_metric(name, value, "count", idx, dimensions)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Log a time.

        Raises:
            ValueError: The unit is no time.
        """
        if unit not in ("ms", "s"):
            raise ValueError(f"{name}: the unit of a time is ms or s, not {unit!r}")
        if name not in _TIMES_OF_TORCHSERVE:
            self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Log a size.

        Raises:
            ValueError: The unit is no size.
        """
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError(f"{name}: the unit of a size is B, kB, MB or GB, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Log a part in percent."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(
        self, name: str, value: float | str, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """Log an error."""
        before, self.request_ids = self.request_ids, None
        try:
            self.add_metric(name, value, "", None, dimensions)
        finally:
            self.request_ids = before

    def _added(self, metric: CachingMetric) -> CachingMetric:
        metrics = self.cache.setdefault(metric.metric_type, {})
        if len(metrics) < _MAX_METRICS:
            metrics[metric.metric_name] = metric
        return metric

    def _request_id(self, idx: int | None) -> str | None:
        ids = self.request_ids
        if not isinstance(ids, Mapping):
            return ids
        return ids[idx] if idx is not None and idx in ids else ",".join(ids.values())


def emit_metrics(metrics: Sequence[object] | None) -> None:
    """Log metrics that a handler keeps itself, as `ts.service` does."""
    for each in metrics or ():
        if _window.has_room(time.monotonic()):
            logger.info("[METRICS]%s", each)


class _Window:
    """Counts the lines of the last seconds."""

    def __init__(self) -> None:
        self._began = 0.0
        self._num = 0

    def has_room(self, now: float) -> bool:
        """Return whether another line may be logged; say once how many were not."""
        if now >= self._began + _WINDOW_S:
            if (left_out := self._num - _MAX_LINES) > 0:
                logger.warning("%d values of handlers' metrics were not logged", left_out)
            self._began, self._num = now, 0
        self._num += 1
        return self._num <= _MAX_LINES


_window = _Window()


def _log(metric: CachingMetric, value: object, dimensions: str, request_id: str) -> None:
    if _window.has_room(time.monotonic()):
        logger.info(
            "[METRICS]%s.%s:%s|#%s|#type:%s|#hostname:%s,%d%s",
            metric.metric_name,
            metric.unit,
            value,
            dimensions,
            metric.metric_type.name,
            socket.gethostname(),
            time.time(),
            f",{request_id}" if request_id else "",
        )
