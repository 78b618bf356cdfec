"""Compares the wanted agents with those that Ray has, and tells Ray what to change.

One `step` each second, in the process of `inferpool place` that uses Ray. After a restart it reads
its whole state from Ray: agents go on without it.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from inferpool.service.tools.place.keeper import digest
from inferpool.service.tools.place.ray_nodes import Gone, HostNode, KeeperState, RayNodes
from inferpool.workers.shared.backoff import Backoff

logger = logging.getLogger(__name__)

_PLACING_S = 60.0
"""An actor that has not started by then is placed anew."""
_STEADY_S = 60.0
"""After an agent has run for this long, its next pause is the shortest one."""
_MAX_PAUSE_S = 60.0
_ASK_S = 30.0
"""Between requests for hosts: a restarted GCS may not know of the last one."""


class Phase(Enum):
    """State of the agent of a node."""

    PLACING = "placing"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSING = "pausing"


@dataclass(slots=True)
class _Seat:
    """A node that has an agent, or will have one."""

    node: HostNode
    name: str
    """The name of its host."""
    order: bytes
    phase: Phase
    since: float
    number: int
    """Nodes are numbered in the order in which they were chosen."""
    pauses: Backoff = field(default_factory=lambda: Backoff(1.0, _MAX_PAUSE_S))
    until: float = 0.0
    """End of the pause."""
    has_actor: bool = True
    is_leaving: bool = False
    told: set[str] = field(default_factory=set)
    """Warnings that were written once."""


class Placer:
    """Keeps an agent on each of the wanted number of hosts."""

    def __init__(
        self,
        cluster: RayNodes,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        stop_s: float,
    ) -> None:
        """Start with no knowledge of the cluster.

        Args:
            cluster: The interface to Ray.
            arguments: Those of the command `inferpool`, without `--name NAME`.
            environ: Variables that agents get in addition to those of their host.
            stop_s: How long an agent may drain before it is killed.
        """
        self._cluster = cluster
        self._arguments = arguments
        self._environ = dict(environ)
        self._stop_s = stop_s
        self._nodes: dict[str, HostNode] = {}
        self._seats: dict[str, _Seat] = {}
        self._num_taken = 0
        self._asked: tuple[float, int] | None = None

    @property
    def num_running(self) -> int:
        """Agents that run and are to go on."""
        return sum(seat.phase is Phase.RUNNING for seat in self._seats.values())

    @property
    def num_seats(self) -> int:
        """Nodes that have an actor, or will have one."""
        return len(self._seats)

    def survey(self, now: float) -> None:
        """Read the nodes, and find the agents of an earlier run."""
        self._nodes = {node.id: node for node in self._cluster.nodes()}
        self._leave_lost_nodes()
        self._adopt(now)

    def step(self, now: float, wanted: int | None, num_asked: int = 0) -> None:
        """Bring the agents nearer to the wanted number.

        Args:
            now: The time, from any clock that does not jump.
            wanted: Wanted agents; None for one on each host.
            num_asked: Hosts to request from the cluster's autoscaler.
        """
        self.survey(now)
        states = self._cluster.look([id for id, seat in self._seats.items() if seat.has_actor])
        for id, state in states.items():
            self._judge(now, self._seats[id], state)
        self._end_pauses(now)
        self._fit(now, wanted)
        self._ask(now, num_asked)

    def _ask(self, now: float, num_hosts: int) -> None:
        if self._asked is None or self._asked[1] != num_hosts or now - self._asked[0] > _ASK_S:
            self._cluster.ask_for(num_hosts)
            self._asked = now, num_hosts

    def _leave_lost_nodes(self) -> None:
        for id, seat in list(self._seats.items()):
            if id in self._nodes:
                seat.node = self._nodes[id]
            else:
                logger.warning("the node %s of %s is gone", id, seat.name)
                self._remove(seat)

    def _adopt(self, now: float) -> None:
        """Adopt the actors of an earlier run, and remove those of nodes that are gone."""
        for id in self._cluster.keepers():
            if id in self._seats:
                continue
            if id in self._nodes:
                self._take(now, self._nodes[id], Phase.RUNNING)
            else:
                self._cluster.remove(id)

    def _take(self, now: float, node: HostNode, phase: Phase) -> _Seat:
        self._num_taken += 1
        name = self._name_of(node)
        seat = _Seat(
            node=node,
            name=name,
            order=self._order_for(name),
            phase=phase,
            since=now,
            number=self._num_taken,
        )
        self._seats[node.id] = seat
        return seat

    def _judge(self, now: float, seat: _Seat, state: KeeperState | Gone) -> None:
        """Act on an actor's report of its agent."""
        if seat.phase is Phase.STOPPING and now - seat.since > self._stop_s:
            logger.warning("the agent on %s does not end: it is killed", seat.name)
            self._remove(seat)
        elif state is Gone.SILENT:
            if seat.phase is Phase.PLACING and now - seat.since > _PLACING_S:
                self._cluster.remove(seat.node.id)
                seat.has_actor = False
                self._fail(now, seat, f"Ray has not started its actor in {_PLACING_S:.0f} s")
        elif state is Gone.DEAD:
            seat.has_actor = False
            if seat.phase is Phase.STOPPING:
                self._remove(seat)
            else:
                self._fail(now, seat, "its actor has ended")
        else:
            assert isinstance(state, KeeperState)
            self._judge_agent(now, seat, state)

    def _judge_agent(self, now: float, seat: _Seat, state: KeeperState) -> None:
        if state.niceness > 0:
            self._warn_once(
                seat,
                f"agents on {seat.name} run with niceness {state.niceness}, so whatever "
                "else runs there goes first: set RAY_worker_niceness=0 where its raylet starts",
            )
        if state.pid is not None:
            if state.is_stopping and seat.phase is not Phase.STOPPING:
                seat.phase, seat.since, seat.is_leaving = Phase.STOPPING, now, False
            elif seat.phase is Phase.PLACING:
                seat.phase, seat.since = Phase.RUNNING, now
            if seat.phase is Phase.RUNNING:
                self._go_on(now, seat, state)
        elif seat.phase is Phase.STOPPING:
            logger.info("the agent on %s has ended", seat.name)
            if seat.is_leaving or seat.node.is_draining:
                self._remove(seat)
            else:
                self._start(now, seat)
        elif seat.phase is Phase.PLACING or not state.order:
            self._start(now, seat)
        elif seat.phase is Phase.RUNNING:
            self._fail(now, seat, state.problem or _ending_of(state.exit_status))

    def _go_on(self, now: float, seat: _Seat, state: KeeperState) -> None:
        """Stop a running agent if its node leaves or its order has changed."""
        if now - seat.since > _STEADY_S:
            seat.pauses.reset()
        if seat.node.is_draining:
            self._stop(now, seat, "its node is being drained", is_leaving=True)
        elif state.order != digest(seat.order) and not self._is_any(Phase.STOPPING):
            self._stop(now, seat, "it was started with other flags or keys", is_leaving=False)

    def _start(self, now: float, seat: _Seat) -> None:
        if seat.node.is_draining:
            self._remove(seat)
            return
        logger.info("starting the agent on %s", seat.name)
        self._cluster.start(seat.node.id, seat.order)
        seat.phase, seat.since = Phase.RUNNING, now

    def _stop(self, now: float, seat: _Seat, why: str, *, is_leaving: bool) -> None:
        logger.info("stopping the agent on %s: %s", seat.name, why)
        self._cluster.stop(seat.node.id)
        seat.phase, seat.since, seat.is_leaving = Phase.STOPPING, now, is_leaving

    def _fail(self, now: float, seat: _Seat, why: str) -> None:
        """Plan another start there after a pause that doubles; the GPUs stay reserved."""
        pause_s = seat.pauses.next_s()
        logger.warning("no agent runs on %s (%s): starting one in %.0f s", seat.name, why, pause_s)
        seat.phase, seat.until = Phase.PAUSING, now + pause_s

    def _end_pauses(self, now: float) -> None:
        for seat in list(self._seats.values()):
            if seat.phase is Phase.PAUSING and seat.node.is_draining:
                self._remove(seat)
            elif seat.phase is Phase.PAUSING and now >= seat.until:
                if seat.has_actor:  # its next look finds no agent, and starts one
                    seat.phase, seat.since = Phase.PLACING, now
                else:
                    self._place(now, seat)

    def _fit(self, now: float, wanted: int | None) -> None:
        """Place agents on free nodes, or stop surplus ones."""
        free = [
            node
            for id, node in sorted(self._nodes.items())
            if id not in self._seats and not node.is_draining
        ]
        staying = [
            seat
            for seat in self._seats.values()
            if not (seat.phase is Phase.STOPPING and (seat.is_leaving or seat.node.is_draining))
        ]
        num_more = len(free) if wanted is None else wanted - len(staying)
        for node in free[: max(num_more, 0)]:
            self._place(now, self._take(now, node, Phase.PLACING))
        if num_more < 0:
            # First those that do nothing yet, then the newest.
            order = sorted(staying, key=lambda seat: (seat.phase is Phase.RUNNING, -seat.number))
            for seat in order[:-num_more]:
                self._give_back(now, seat)

    def _give_back(self, now: float, seat: _Seat) -> None:
        if seat.phase is Phase.RUNNING:
            self._stop(now, seat, "fewer hosts are wanted", is_leaving=True)
        elif seat.phase is Phase.STOPPING:
            seat.is_leaving = True
        else:
            self._remove(seat)

    def _place(self, now: float, seat: _Seat) -> None:
        seat.phase, seat.since, seat.has_actor = Phase.PLACING, now, True
        self._cluster.place(seat.node)

    def _remove(self, seat: _Seat) -> None:
        self._cluster.remove(seat.node.id)
        del self._seats[seat.node.id]

    def _name_of(self, node: HostNode) -> str:
        """Return a name that no other host has."""
        namesakes = [each for each in self._nodes.values() if each.hostname == node.hostname]
        return node.hostname if len(namesakes) == 1 else f"{node.hostname}-{node.id[:8]}"

    def _order_for(self, name: str) -> bytes:
        arguments = [*self._arguments[:1], "--name", name, *self._arguments[1:]]
        return json.dumps({"arguments": arguments, "environ": self._environ}).encode()

    def _is_any(self, phase: Phase) -> bool:
        return any(seat.phase is phase for seat in self._seats.values())

    def _warn_once(self, seat: _Seat, text: str) -> None:
        if text not in seat.told:
            seat.told.add(text)
            logger.warning("%s", text)


def _ending_of(status: int | None) -> str:
    if status is None:
        return "it has not started"
    return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
