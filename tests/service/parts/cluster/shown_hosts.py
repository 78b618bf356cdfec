"""Fakes of connected hosts, to be shown."""

import time
from dataclasses import replace
from types import SimpleNamespace

from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import ForkserverHealth
from inferpool.workers.remote.wire import HostFacts, HostVitals
from tests.page_states import gpu

GPU = replace(gpu(0), uuid="GPU-5f", memory_used_bytes=8)


class FakeHost:
    def __init__(self, name: str, epoch: int = 1, **vitals: object) -> None:
        self.facts = HostFacts(
            name=name,
            instance="abc",
            pid=77,
            version="1.2",
            torch="2.9",
            python="3.12",
            devices=Host(cpus=(0, 1), num_cores=2),
        )
        self.address = "10.0.0.7:41234"
        self.epoch = epoch
        self.joined_at = time.time() - 5
        self.round_trip_s, self.clock_offset_s = 0.002, -0.25
        self.last_beat_age_s, self.is_silent, self.has_left = 0.125, False, False
        self.vitals = HostVitals(
            forkserver=ForkserverHealth(pid=78, state="ready", incarnation=0),
            arena_bytes=1000,
            arena_used_bytes=250,
            wall_time=time.time(),
            gpus=[GPU],
        )
        self.asked: list[int] = []
        self.error: Exception | None = None

    async def measure(self, num_bytes: int) -> tuple[float, float]:
        self.asked.append(num_bytes)
        if self.error:
            raise self.error
        return 100e6, 200e6


def slot_on(host: str, state: str):
    hosts = (host,) if host else ()
    return SimpleNamespace(config=SimpleNamespace(host=host, hosts=hosts), state=state)
