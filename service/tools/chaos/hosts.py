"""Strikes at whole hosts: their agents are killed, stopped and ended in turn, and come back."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.chaos.watch import HostKind, Recovery, Watch
from inferpool.service.tools.trial.agents import TrialAgent

TURNS: Sequence[HostKind] = ("host kill", "host stop", "host end")
"""Ways to strike hosts, which take turns."""
_NOTICED_S = 30.0
"""How long a stopped host stays stopped if the service does not notice. The lease is 3 s."""
_PAUSE_S = 1.0
"""How long it stays stopped at most once the service has noticed: on average half of it."""
_WAIT_S = 0.02


@dataclass(slots=True, kw_only=True)
class HostFaults:
    """Strikes hosts of a service, and brings them back. Lives in the event loop."""

    watch: Watch
    agents: Sequence[TrialAgent]
    seed: int
    failed: list[str] = field(default_factory=list)
    """Problems of agents that were asked to end."""
    _num_struck: int = 0
    _rng: random.Random = field(init=False)
    _comings: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Seed all random choices."""
        self._rng = random.Random(f"{self.seed} hosts")

    async def strike(self) -> None:
        """Strike a healthy host as soon as another one is healthy, unless it is the only one."""
        least = min(2, len(self.agents))
        while len(well := await self._well()) < least:  # noqa: ASYNC110  # the service tells who asks
            await asyncio.sleep(_WAIT_S)
        name = self._rng.choice(sorted(well))
        agent = next(each for each in self.agents if each.name == name)
        kind = TURNS[self._num_struck % len(TURNS)]
        self._num_struck += 1
        family = [] if kind == "host stop" else agent.family()  # its processes go on after a stop
        recovery = Recovery(
            kind=kind,
            worker=name,
            incarnation=well[name],
            processes=family,
            began=time.monotonic(),
            host=name,
        )
        if kind == "host kill":
            agent.kill()
        elif kind == "host stop":
            agent.pause()
        else:
            agent.end()
        self.watch.add(recovery)
        coming = asyncio.create_task(self._bring_back(agent, recovery))
        self._comings.add(coming)
        coming.add_done_callback(self._comings.discard)

    async def settle(self) -> None:
        """Wait until all struck hosts have been brought back."""
        await asyncio.gather(*self._comings)

    async def _bring_back(self, agent: TrialAgent, recovery: Recovery) -> None:
        if recovery.kind == "host stop":
            until = time.monotonic() + _NOTICED_S
            while recovery.noticed is None and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_WAIT_S)
            await asyncio.sleep(self._rng.uniform(0.0, _PAUSE_S))
            recovery.freed = time.monotonic()
            agent.resume()
            return
        code = await agent.ended()
        if recovery.kind == "host end" and code != 0:
            self.failed.append(f"the agent {agent.name} exited with {code} when it was told to end")
        recovery.freed = time.monotonic()
        agent.start()

    async def _well(self) -> Mapping[str, int]:
        """Return the epochs of hosts that are connected with all workers ready, and not struck."""
        struck = {each.host for each in self.watch.pending if each.is_of_host}
        health = await self.watch.seen()
        return {
            host.name: host.epoch
            for host in health.hosts
            if host.name not in struck and health.is_host_full(host)
        }
