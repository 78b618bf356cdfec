"""Reads the load of a front end from its /health and /metrics. `inferpool place` runs it."""

import ssl
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from inferpool.service.client.cli.flags import METRICS_KEY_VARIABLE
from inferpool.service.client.connecting import STRAIGHT, open_client
from inferpool.service.client.health import ServiceHealth
from inferpool.service.client.reaching import why_unreached
from inferpool.service.client.urls import without_password
from inferpool.service.tools.place.scaling import Demand

_TIMEOUT_S = 3.0
_MIN_CALLS = 20
"""Answers that a percentile needs."""
_NO_ROOM = {"queue_full", "arena_full", "deadline", "objective", "unavailable"}
"""Reasons of refusals that more hosts would prevent."""


class LoadError(Exception):
    """The front end does not report its load now; the message says why."""


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """A front end's counters since its start, and its load now."""

    accepted: float = 0.0
    refused: float = 0.0
    busy_s: float = 0.0
    """Seconds in which workers prepared or computed: the longer of the two."""
    num_workers: float = 0.0
    queue_share: float = 0.0
    durations: dict[str, dict[float, float]] = field(default_factory=dict)
    """Answered calls of each model by the upper edge of the bucket, cumulative."""
    num_hosts: int = 0

    def since(self, before: "LoadCounts", seconds: float, objective_s: float) -> Demand | None:
        """Return the load since an earlier reading; None if the front end has started in between.

        Args:
            before: The earlier reading.
            seconds: Time between the two.
            objective_s: Latency that 99 % of the calls are to have at most; 0 for none.
        """
        accepted, refused = self.accepted - before.accepted, self.refused - before.refused
        busy_s = self.busy_s - before.busy_s
        if min(accepted, refused, busy_s, seconds) < 0 or seconds == 0:
            return None
        room_s = seconds * max(self.num_workers, before.num_workers)
        p99_s = max(
            (_p99(now, before.durations.get(model, {})) for model, now in self.durations.items()),
            default=0.0,
        )
        return Demand(
            num_hosts=self.num_hosts,
            offered_per_s=(accepted + refused) / seconds,
            refused_per_s=refused / seconds,
            busy=min(busy_s / room_s, 1.0) if room_s else 0.0,
            queue_share=self.queue_share,
            p99_ratio=p99_s / objective_s if objective_s else 0.0,
        )


class FrontLoad:
    """Reads the load of one front end."""

    def __init__(
        self,
        url: str,
        key: str,
        context: ssl.SSLContext,
        objective_s: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Store the addresses to ask; `transport` replaces the network (see httpx)."""
        self._place = without_password(url)
        self._url = url
        self._objective_s = objective_s
        self._client = open_client(
            STRAIGHT,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=context,
            timeout=httpx.Timeout(_TIMEOUT_S),
            transport=transport,
        )
        self._before: tuple[float, LoadCounts] | None = None

    def read(self, now: float) -> Demand | None:
        """Return the load since the last call; None for the first, and after a new start.

        Raises:
            LoadError: The front end does not report it.
        """
        counts = counts_in(self._get("/metrics").text)
        counts.num_hosts = _num_hosts(self._get("/health").content)
        before, self._before = self._before, (now, counts)
        return counts.since(before[1], now - before[0], self._objective_s) if before else None

    def _get(self, path: str) -> httpx.Response:
        try:
            answer = self._client.get(self._url + path)
        except httpx.TransportError as error:
            said = why_unreached(error, self._url, command="inferpool place", flag="--front-end")
            raise LoadError(said) from error
        if answer.status_code in (401, 403):
            raise LoadError(
                f"{self._place} wants a key for metrics: the variable {METRICS_KEY_VARIABLE}"
            )
        if answer.status_code != 200 and path == "/metrics":  # /health answers 503 while red
            raise LoadError(f"{self._place}{path} answers with {answer.status_code}")
        return answer


def counts_in(text: str) -> LoadCounts:
    """Return the counts in a page of metrics.

    Raises:
        LoadError: The text is no page of metrics.
    """
    counts = LoadCounts()
    depth: dict[str, float] = {}
    most: dict[str, float] = {}
    spent: dict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                model, value = sample.labels.get("model", ""), sample.value
                match sample.name.removeprefix("inferpool_"):
                    case "instances_total" if sample.labels["outcome"] == "accepted":
                        counts.accepted += value
                    case "rejected_total" if sample.labels["reason"] in _NO_ROOM:
                        counts.refused += value
                    case "worker_up":
                        counts.num_workers += value
                    case "queue_depth":
                        depth[model] = value
                    case "max_queue_length":
                        most[model] = value
                    case "prepare_duration_seconds_sum" | "inference_duration_seconds_sum" as name:
                        spent[name] += value
                    case "request_duration_seconds_bucket":
                        edges = counts.durations.setdefault(model, {})
                        edges[float(sample.labels["le"])] = value
    except (ValueError, KeyError) as error:
        raise LoadError(f"the front end's /metrics cannot be read: {error!r}") from error
    counts.busy_s = max(spent.values(), default=0.0)
    counts.queue_share = max(_shares(depth, most), default=0.0)
    return counts


def _num_hosts(body: bytes) -> int:
    try:
        return len(msgspec.json.decode(body, type=ServiceHealth).hosts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"the front end's /health cannot be read: {error}") from error


def _shares(depth: dict[str, float], most: dict[str, float]) -> Iterable[float]:
    return (num / most[model] for model, num in depth.items() if most.get(model))


def _p99(now: dict[float, float], before: dict[float, float]) -> float:
    """Return the 99th percentile of the calls between two readings, within its bucket's edges."""
    counts = [(edge, num - before.get(edge, 0.0)) for edge, num in sorted(now.items())]
    if not counts or counts[-1][1] < _MIN_CALLS:
        return 0.0
    target = 0.99 * counts[-1][1]
    below_edge, below = 0.0, 0.0
    for edge, num in counts:
        if num >= target:
            if edge == float("inf"):
                return below_edge
            return below_edge + (edge - below_edge) * (target - below) / max(num - below, 1e-9)
        below_edge, below = edge, num
    return below_edge
