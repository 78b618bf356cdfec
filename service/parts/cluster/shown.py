"""Stores what is shown of the hosts: those that are connected, and those that were lost lately.

Used in the front end's event loop.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferpool.service.api.errors import NotFoundError
from inferpool.service.api.routes.health import HealthReport, HostHealth, LostHostHealth
from inferpool.service.errors import ConflictError, UnavailableError
from inferpool.service.parts.admin.operations import HostSpeed
from inferpool.service.telemetry.metrics import Reading, gpu_gauges
from inferpool.workers.host.slots import WorkerSlot

if TYPE_CHECKING:
    from inferpool.workers.remote.host import RemoteHost

_SHOWN_S = 600.0
"""Seconds for which a host that was lost is shown."""
_MOST_LOST = 64
_FIRST_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_MEASURED_S = 0.25
"""Seconds for which a measurement should send each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    host: "RemoteHost"
    state: str
    """`lost`, or `left` if that was intended."""
    reason: str
    at: float
    """Monotonic seconds."""


class ShownHosts:
    """The hosts of a cluster, as `/health` and `/metrics` show them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Show no host yet.

        Args:
            now: Returns the time in seconds of a monotonic clock.
        """
        self._now = now
        self.address: str | None = None
        """Address at which agents join; None if this is no cluster."""
        self.standby: Callable[[], str] = str
        """Returns why no agent may join now, since another front end serves; empty if they may."""
        self._connected: dict[str, RemoteHost] = {}
        self._losses: dict[str, _Loss] = {}
        """Hosts that are not connected any more, the latest last."""
        self._num_lost: Counter[str] = Counter()
        """Connections that have ended, by state."""
        self._measured: set[str] = set()
        """Hosts to which the connection is being measured."""

    def on_joined(self, host: "RemoteHost") -> None:
        """Show a host as connected."""
        self._connected[host.facts.name] = host
        self._losses.pop(host.facts.name, None)

    def on_lost(self, host: "RemoteHost", reason: str) -> None:
        """Show a host as lost, for a while."""
        name = host.facts.name
        if self._connected.get(name) is not host:
            return
        del self._connected[name]
        state = "left" if host.has_left else "lost"
        loss = _Loss(host=host, state=state, reason=reason, at=self._now())
        self._losses.pop(name, None)
        self._losses[name] = loss
        self._num_lost[loss.state] += 1
        if len(self._losses) > _MOST_LOST:
            del self._losses[next(iter(self._losses))]

    def add_to_health(self, report: HealthReport, slots: Sequence[WorkerSlot]) -> HealthReport:
        """Return a report of /health with the state of all hosts now.

        Args:
            report: The report without them.
            slots: The workers of all models.
        """
        hosts = sorted(self._connected.items())
        return replace(
            report,
            cluster_address=self.address,
            standby=self.standby(),
            hosts=[
                _health(host, [s for s in slots if s.config.host == name]) for name, host in hosts
            ],
            lost_hosts=[_lost_health(loss, self._now()) for loss in reversed(self._lost_lately())],
        )

    def read_gauges(self, slots: Sequence[WorkerSlot]) -> Iterator[Reading]:
        """Yield the gauges of all hosts; none if this is no cluster."""
        if self.address is None:
            return
        yield Reading(name="standby", value=bool(self.standby()))
        yield Reading(name="hosts", value=len(self._connected))
        for reason in ("left", "lost"):
            yield Reading(name="hosts_lost", value=self._num_lost[reason], labels=(reason,))
        for loss in self._lost_lately():
            if loss.state == "lost":
                yield Reading(name="host_up", value=0, labels=(loss.host.facts.name,))
        ready = Counter(slot.config.host for slot in slots if slot.state == "ready")
        for name, host in self._connected.items():
            yield from _host_gauges(host, ready[name])

    async def measure(self, name: str) -> HostSpeed:
        """Measure the connection to a host, which other traffic shares meanwhile.

        Raises:
            NotFoundError: No such host is connected.
            ConflictError: It is being measured.
            UnavailableError: The host was lost meanwhile, or takes too long.
        """
        host = self._connected.get(name)
        if host is None:
            there = ", ".join(self._connected) or "none"
            raise NotFoundError(f"no host {name[:80]!r} is connected; there are: {there}")
        if name in self._measured:
            raise ConflictError(f"the connection to {name} is being measured")
        self._measured.add(name)
        try:
            first = await host.measure(_FIRST_BYTES)
            num_bytes = int(min(max(_FIRST_BYTES, min(first) * _MEASURED_S), _MOST_BYTES))
            to_host, from_host = await host.measure(num_bytes)
        except (ConnectionError, TimeoutError) as error:
            text = f"{name} could not be measured: {error or 'it took too long'}"
            raise UnavailableError(text, retry_after_s=1) from error
        finally:
            self._measured.discard(name)
        return HostSpeed(
            host=name,
            to_bytes_per_s=round(to_host),
            from_bytes_per_s=round(from_host),
            round_trip_s=host.round_trip_s,
            num_bytes=num_bytes,
        )

    def _lost_lately(self) -> list[_Loss]:
        """Return the losses that are shown, and forget the others."""
        since = self._now() - _SHOWN_S
        self._losses = {name: loss for name, loss in self._losses.items() if loss.at >= since}
        return list(self._losses.values())


def _health(host: "RemoteHost", slots: Sequence[WorkerSlot]) -> HostHealth:
    facts, vitals = host.facts, host.vitals
    has_told = bool(vitals.wall_time)
    return HostHealth(
        name=facts.name,
        address=host.address,
        state="silent" if host.is_silent else "connected",
        devices=facts.devices.describe(),
        epoch=host.epoch,
        workers=len(slots),
        workers_ready=sum(slot.state == "ready" for slot in slots),
        version=facts.version,
        torch=facts.torch,
        python=facts.python,
        pid=facts.pid,
        connected_s=round(time.time() - host.joined_at, 3),
        last_beat_age_s=round(host.last_beat_age_s, 3),
        round_trip_s=round(host.round_trip_s, 6) if has_told else None,
        clock_offset_s=round(host.clock_offset_s, 4) if has_told else None,
        arena_bytes=vitals.arena_bytes,
        arena_used_bytes=vitals.arena_used_bytes,
        forkserver=vitals.forkserver,
        gpus=vitals.gpus,
    )


def _lost_health(loss: _Loss, now: float) -> LostHostHealth:
    return LostHostHealth(
        name=loss.host.facts.name,
        address=loss.host.address,
        state=loss.state,
        epoch=loss.host.epoch,
        reason=loss.reason,
        age_s=round(now - loss.at, 3),
    )


def _host_gauges(host: "RemoteHost", num_ready: int) -> Iterator[Reading]:
    name, vitals = host.facts.name, host.vitals
    values: dict[str, float] = {
        "up": 1,
        "workers_ready": num_ready,
        "beat_age_seconds": host.last_beat_age_s,
    }
    if vitals.wall_time:
        values |= {
            "round_trip_seconds": host.round_trip_s,
            "clock_offset_seconds": host.clock_offset_s,
            "arena_bytes": vitals.arena_bytes,
            "arena_used_bytes": vitals.arena_used_bytes,
        }
    for what, value in values.items():
        yield Reading(name=f"host_{what}", value=value, labels=(name,))
    yield from gpu_gauges(vitals.gpus, name)
