import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from inferpool.service.tools.place.keeper import digest
from inferpool.service.tools.place.placer import Placer
from inferpool.service.tools.place.ray_nodes import Gone, HostNode, KeeperState, RayNodes


@dataclass
class FakeRay(RayNodes):
    """A cluster whose actors start, and whose agents end, when the test says so."""

    hosts: dict[str, HostNode] = field(default_factory=dict)
    actors: dict[str, KeeperState | Gone] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    orders: dict[str, dict[str, object]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    starts_at_once: bool = True

    def add(self, *ids: str) -> None:
        for id in ids:
            self.hosts[id] = HostNode(id=id, hostname=f"host-{id}", num_gpus=2)

    def drain(self, id: str) -> None:
        self.hosts[id] = replace(self.hosts[id], is_draining=True)

    def end(self, id: str, status: int = 0) -> None:
        state = self.actors[id]
        assert isinstance(state, KeeperState)
        self.actors[id] = replace(state, pid=None, exit_status=status)

    def nodes(self) -> Sequence[HostNode]:
        return list(self.hosts.values())

    def keepers(self) -> Sequence[str]:
        return [id for id, state in self.actors.items() if state is not Gone.DEAD]

    def place(self, node: HostNode) -> None:
        self.calls.append(f"place {node.id}")
        self.actors[node.id] = KeeperState() if self.starts_at_once else Gone.SILENT

    def look(self, ids: Sequence[str]) -> dict[str, KeeperState | Gone]:
        return {id: self.actors[id] for id in ids}

    def start(self, id: str, order: bytes) -> None:
        self.calls.append(f"start {id}")
        self.orders[id] = json.loads(order)
        self.actors[id] = KeeperState(pid=1, order=digest(order))

    def stop(self, id: str) -> None:
        self.calls.append(f"stop {id}")
        state = self.actors[id]
        assert isinstance(state, KeeperState)
        self.actors[id] = replace(state, is_stopping=True)

    def remove(self, id: str) -> None:
        self.calls.append(f"remove {id}")
        self.actors.pop(id, None)

    def ask_for(self, num_hosts: int) -> None:
        self.asked.append(num_hosts)

    def take_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def ray_of(*ids: str, starts_at_once: bool = True) -> FakeRay:
    ray = FakeRay(starts_at_once=starts_at_once)
    ray.add(*ids)
    return ray


def placer(ray: FakeRay, *flags: str) -> Placer:
    arguments = ["agent", "--join", "front:7", *flags]
    return Placer(ray, arguments, {"KEYS": "secret"}, stop_s=30.0)


def settled(ray: FakeRay, wanted: int | None = None) -> Placer:
    """Return a placer whose agents run."""
    one = placer(ray)
    steps(one, 0, 1, 2, wanted=wanted)
    ray.take_calls()
    return one


def steps(one: Placer, *moments: float, wanted: int | None = None) -> None:
    for now in moments:
        one.step(now, wanted)


def calls(ray: FakeRay, one: Placer, *moments: float, wanted: int | None = None) -> list[str]:
    """Return what was asked of Ray in these moments."""
    steps(one, *moments, wanted=wanted)
    return ray.take_calls()


def test_every_node_gets_an_agent_also_one_that_joins_later():
    ray = ray_of("a", "b")
    one = placer(ray)
    assert calls(ray, one, 0, 1) == ["place a", "place b", "start a", "start b"]
    assert one.num_running == 2
    assert ray.orders["a"] == {
        "arguments": ["agent", "--name", "host-a", "--join", "front:7"],
        "environ": {"KEYS": "secret"},
    }
    ray.add("c")
    assert calls(ray, one, 2, 3) == ["place c", "start c"]


def test_only_as_many_as_wanted_are_placed_and_the_autoscaler_is_told_once():
    ray = ray_of("a", "b", "c")
    one = placer(ray)
    for now in range(5):
        one.step(float(now), 2, 2)
    assert ray.take_calls() == ["place a", "place b", "start a", "start b"]
    one.step(5.0, 4, 4)
    assert ray.take_calls() == ["place c"]
    assert ray.asked == [2, 4]
    one.step(36.0, 4, 4)
    assert ray.asked == [2, 4, 4], "a GCS that has started again may not know"


def test_nodes_with_one_hostname_get_names_of_their_own():
    ray = FakeRay()
    for id in ("1234567890", "abcdefghij"):
        ray.hosts[id] = HostNode(id=id, hostname="vm", num_gpus=0)
    settled(ray)
    names = [order["arguments"][2] for order in ray.orders.values()]  # type: ignore[index]
    assert names == ["vm-12345678", "vm-abcdefgh"]


def test_surplus_agents_drain_before_their_node_is_freed_the_newest_first():
    ray = ray_of("a", "b", "c")
    one = settled(ray, 3)
    assert calls(ray, one, 10, 11, wanted=1) == ["stop c", "stop b"]
    ray.end("c")
    assert calls(ray, one, 12, wanted=1) == ["remove c"]
    ray.end("b")
    steps(one, 13, wanted=2)  # one more is wanted again, and b was on its way out
    assert ray.take_calls()[:2] == ["remove b", "place b"]


def test_another_node_takes_the_place_of_one_that_drains_or_is_lost():
    ray = ray_of("a", "b", "c")
    one = settled(ray, 2)
    ray.drain("a")
    assert calls(ray, one, 10, wanted=2) == ["stop a", "place c"]
    ray.end("a")
    assert calls(ray, one, 11, 12, wanted=2) == ["remove a", "start c"]
    ray.add("d")
    del ray.hosts["b"]
    assert calls(ray, one, 13, wanted=2) == ["remove b", "place d"]


def test_agent_that_does_not_end_is_killed_in_the_end():
    ray = ray_of("a")
    one = settled(ray, 1)
    assert calls(ray, one, 10, 39, wanted=0) == ["stop a"]
    assert calls(ray, one, 41, wanted=0) == ["remove a"]
    assert one.num_seats == 0


def test_agent_that_ends_starts_again_after_pauses_that_double_and_keeps_its_reservation():
    ray = ray_of("a")
    one = settled(ray)
    starts = []
    for tenth in range(100, 2000):
        state = ray.actors["a"]
        if isinstance(state, KeeperState) and state.pid is not None:
            ray.end("a", 1)
        one.step(tenth / 10, None)
        if ray.take_calls() == ["start a"]:
            starts.append(tenth / 10)
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert [round(pause) for pause in pauses[:6]] == [2, 4, 8, 16, 32, 60]


def test_pause_is_short_again_once_an_agent_has_run_for_a_while():
    ray = ray_of("a")
    one = settled(ray)
    for began in (10.0, 200.0, 400.0):
        steps(one, began)
        ray.end("a", 1)
        assert calls(ray, one, began + 1, began + 2.1, began + 2.2) == ["start a"]


def test_actor_that_has_died_or_never_starts_is_made_anew():
    ray = ray_of("a")
    one = settled(ray)
    ray.actors["a"] = Gone.DEAD
    assert calls(ray, one, 10, 11.1, 12) == ["place a", "start a"]
    slow = ray_of("a", starts_at_once=False)
    steps(placer(slow), 0, 59, 61, 62.1)
    assert slow.take_calls() == ["place a", "remove a", "place a"]


def test_silent_actor_is_left_alone_since_its_agent_may_serve():
    ray = ray_of("a")
    one = settled(ray)
    ray.actors["a"] = Gone.SILENT
    assert calls(ray, one, *range(10, 500, 10)) == []


def test_another_placer_finds_the_agents_and_disturbs_none():
    ray = ray_of("a", "b")
    settled(ray)
    ray.actors["of a node that is gone"] = KeeperState(pid=1)
    other = placer(ray)
    assert calls(ray, other, *range(5)) == ["remove of a node that is gone"]
    assert other.num_running == 2


def test_agents_with_other_flags_are_replaced_one_after_the_other():
    ray = ray_of("a", "b")
    settled(ray)
    other = placer(ray, "--insecure")
    assert calls(ray, other, 0) == ["stop a"]
    ray.end("a")
    assert calls(ray, other, 1) == ["start a", "stop b"]
    ray.end("b")
    assert calls(ray, other, 2, 3) == ["start b"]
    assert other.num_running == 2


def test_niceness_is_told_of_once(caplog):
    ray = ray_of("a")
    one = settled(ray)
    state = ray.actors["a"]
    assert isinstance(state, KeeperState)
    ray.actors["a"] = replace(state, niceness=15)
    steps(one, 10, 11)
    (told,) = [record.message for record in caplog.records if "niceness 15" in record.message]
    assert "RAY_worker_niceness=0" in told
