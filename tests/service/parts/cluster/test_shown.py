"""The state of hosts as it is shown, over fakes of them."""

from collections.abc import Sequence

import pytest

from inferpool.service.api.errors import NotFoundError
from inferpool.service.api.routes.health import HealthReport
from inferpool.service.errors import UnavailableError
from inferpool.service.parts.cluster.shown import ShownHosts
from inferpool.workers.host.slots import WorkerSlot
from inferpool.workers.remote.wire import HostVitals
from tests.service.parts.cluster.shown_hosts import FakeHost, slot_on

SLOTS = [
    slot_on("b", "ready"),
    slot_on("b", "starting"),
    slot_on("a", "ready"),
    slot_on("", "ready"),
]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hosts(clock: Clock) -> ShownHosts:
    hosts = ShownHosts(clock)
    hosts.address = "127.0.0.1:7000"
    return hosts


def shown(hosts: ShownHosts, slots: Sequence[WorkerSlot] = ()) -> HealthReport:
    report = HealthReport(status="starting", ready=False, draining=False, models=[])
    return hosts.add_to_health(report, slots)


def readings(hosts: ShownHosts) -> dict[tuple[str, ...], float]:
    return {(each.name, *each.labels): each.value for each in hosts.read_gauges(SLOTS)}


def test_each_connected_host_is_shown_with_its_own_workers(hosts: ShownHosts):
    for name in ("b", "a"):
        hosts.on_joined(FakeHost(name))
    report = shown(hosts, SLOTS)
    assert [host.name for host in report.hosts] == ["a", "b"]
    host = report.hosts[1]
    assert (host.workers, host.workers_ready, host.state) == (2, 1, "connected")
    assert (host.version, host.torch, host.python) == ("1.2", "2.9", "3.12")
    assert (host.devices, host.address, host.pid) == (["2 CPU cores"], "10.0.0.7:41234", 77)
    assert (host.round_trip_s, host.clock_offset_s) == (0.002, -0.25)
    assert (host.arena_bytes, host.arena_used_bytes, host.gpus[0].uuid) == (1000, 250, "GPU-5f")
    assert host.forkserver is not None
    assert host.connected_s >= 5


def test_what_an_agent_has_not_told_yet_is_not_shown_as_zero(hosts: ShownHosts):
    host = FakeHost("a")
    host.vitals, host.is_silent = HostVitals(), True
    hosts.on_joined(host)
    (shown_host,) = shown(hosts).hosts
    assert (shown_host.round_trip_s, shown_host.clock_offset_s) == (None, None)
    assert (shown_host.state, shown_host.forkserver) == ("silent", None)
    assert ("host_round_trip_seconds", "a") not in readings(hosts)


def test_a_lost_host_is_shown_for_ten_minutes_or_until_it_is_back(hosts: ShownHosts, clock: Clock):
    for name in ("a", "b", "c"):
        hosts.on_joined(FakeHost(name))
    hosts._connected["b"].has_left = True
    for name, reason in (("a", "no sign of life"), ("b", "its agent was told to stop")):
        hosts.on_lost(hosts._connected[name], reason)
    report = shown(hosts)
    assert [host.name for host in report.hosts] == ["c"]
    lost = [(host.name, host.state, host.reason) for host in report.lost_hosts]
    assert lost == [
        ("b", "left", "its agent was told to stop"),
        ("a", "lost", "no sign of life"),
    ]
    seen = readings(hosts)
    assert (seen["host_up", "a"], seen["host_up", "c"]) == (0, 1)
    assert ("host_up", "b") not in seen  # nobody need look after it
    assert (seen["hosts_lost", "lost"], seen["hosts_lost", "left"], seen["hosts",]) == (1, 1, 1)
    hosts.on_joined(FakeHost("a", epoch=2))
    assert [host.name for host in shown(hosts).lost_hosts] == ["b"]
    clock.now += 600.0
    assert [(host.name, host.age_s) for host in shown(hosts).lost_hosts] == [("b", 600.0)]
    clock.now += 0.1
    assert shown(hosts).lost_hosts == []


def test_hosts_of_a_front_end_that_hands_over_have_left(hosts: ShownHosts):
    hosts.on_joined(host := FakeHost("a"))
    host.has_left = True
    hosts.standby = lambda: "standing by for b:7000"
    hosts.on_lost(host, "standing by for b:7000")
    report = shown(hosts)
    assert (report.standby, report.lost_hosts[0].state) == ("standing by for b:7000", "left")
    assert readings(hosts)["standby",] == 1


def test_a_later_connection_of_a_host_is_not_lost_with_an_earlier_one(hosts: ShownHosts):
    first, second = FakeHost("a"), FakeHost("a", epoch=2)
    hosts.on_joined(first)
    hosts.on_joined(second)
    hosts.on_lost(first, "its agent has joined anew")
    assert [host.epoch for host in shown(hosts).hosts] == [2]


def test_gauges_have_the_host_and_its_gpus(hosts: ShownHosts):
    hosts.on_joined(FakeHost("a"))
    seen = readings(hosts)
    assert seen["host_round_trip_seconds", "a"] == 0.002
    assert seen["host_clock_offset_seconds", "a"] == -0.25
    assert seen["host_workers_ready", "a"] == 1
    assert seen["host_arena_used_bytes", "a"] == 250
    assert seen["gpu_memory_used_bytes", "0", "GPU-5f", "a"] == 8


def test_a_service_without_a_cluster_has_no_gauges_of_hosts():
    assert list(ShownHosts().read_gauges(SLOTS)) == []


async def test_a_measurement_sends_what_the_connection_carries_in_a_quarter_of_a_second(
    hosts: ShownHosts,
):
    host = FakeHost("a")
    hosts.on_joined(host)
    speed = await hosts.measure("a")
    assert host.asked == [1 << 20, 25_000_000]
    assert (speed.to_bytes_per_s, speed.from_bytes_per_s) == (100_000_000, 200_000_000)
    assert (speed.host, speed.num_bytes, speed.round_trip_s) == ("a", 25_000_000, 0.002)


async def test_a_host_that_is_not_there_or_goes_cannot_be_measured(hosts: ShownHosts):
    host = FakeHost("a")
    hosts.on_joined(host)
    with pytest.raises(NotFoundError, match="there are: a"):
        await hosts.measure("b")
    host.error = ConnectionError("a was lost: closed")
    with pytest.raises(UnavailableError, match="a was lost"):
        await hosts.measure("a")
    host.error = None
    await hosts.measure("a")
