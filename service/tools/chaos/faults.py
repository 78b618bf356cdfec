"""The faults: which worker, decoder, forkserver or host is struck, how and when.

A seed decides it.
"""

import asyncio
import contextlib
import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import psutil

from inferpool.service.client.health import ForkserverState, WorkerState
from inferpool.service.tools.chaos.hosts import HostFaults
from inferpool.service.tools.chaos.load import PATIENCE_S, ChaosTally
from inferpool.service.tools.chaos.plan import Fault
from inferpool.service.tools.chaos.protocols import Open
from inferpool.service.tools.chaos.questions import Question, is_refusal, problem_code
from inferpool.service.tools.chaos.watch import FORKSERVER, Recovery, Watch, decoder_name
from inferpool.service.tools.trial.connection import Address, NoAnswerError, connect

PLACES = ("preprocess", "forward", "render")
"""Places where a poisoned input acts: see `models.sources.poisonable`."""
PARAMETER = "inferpool_chaos"


@dataclass(frozen=True, slots=True)
class Poison:
    """A kind of poisoned inputs."""

    how: str
    """Name of the act of the model's code: see `models.sources.poisonable`."""
    answer: tuple[int, str]
    """Right status and code of the answer."""
    is_deadly: bool = True
    """Its workers die, so it is quarantined."""


POISONS: Mapping[Fault, Poison] = {
    "poison": Poison("die", (500, "worker_crashed")),
    "scribble": Poison("scribble", (500, "worker_crashed")),
    "exit": Poison("exit", (500, "model_error"), is_deadly=False),
}
BURST = 5
"""Forkservers that a burst kills in a row."""

_FIRST_POISON = 10**15
_RETRY_S = 0.1
_WAIT_S = 0.02


def schedule(seed: int, every_s: Mapping[Fault, float]) -> Iterator[tuple[float, Fault]]:
    """Yield for ever the next moment, in seconds from the beginning, and its fault.

    `every_s` has the mean time between two faults of a kind; 0 is never. Each comes after half to
    one and a half of it, so that it strikes the service in any state.
    """
    rngs = {kind: random.Random(f"{seed} {kind}") for kind in every_s}
    due = [(rngs[kind].uniform(0.5, 1.5) * s, kind) for kind, s in every_s.items() if s > 0]
    heapq.heapify(due)
    while due:
        moment, kind = due[0]
        yield moment, kind
        heapq.heapreplace(due, (moment + rngs[kind].uniform(0.5, 1.5) * every_s[kind], kind))


@dataclass(slots=True)
class Poisonings:
    """Counts of inputs that kill or disturb their workers."""

    num_sent: int = 0
    right: int = 0
    """Inputs with the answer that their kind should have, and with 422 `quarantined` when asked
    again if their workers died."""
    num_quarantined: int = 0
    num_attempts: int = 0
    refused: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class Faults:
    """Strikes a service as the schedule says. Lives in the event loop."""

    address: Address
    watch: Watch
    tally: ChaosTally
    questions: Sequence[Question]
    seed: int
    every_s: Mapping[Fault, float]
    timeout_s: float
    keeps_quarantine: bool
    hosts: HostFaults
    acts: Mapping[Fault, Callable[[], Awaitable[None]]]
    """Faults that take a while, and what they do."""
    key: str = ""
    """API key of poisoned inputs; empty for none."""
    open: Open = connect
    """Opens the connections of poisoned inputs."""
    counts: Counter[Fault] = field(default_factory=Counter)
    poisonings: Poisonings = field(default_factory=Poisonings)
    _rng: random.Random = field(init=False)
    _rest: random.Random = field(init=False)
    _waiting: Mapping[Fault, Callable[[], Awaitable[None]]] = field(init=False)
    """Faults that wait until their target is there."""

    def __post_init__(self) -> None:
        """Seed all random choices, and name the faults that wait."""
        self._waiting = {
            "kill": partial(self._strike, "kill"),
            "stop": partial(self._strike, "stop"),
            "host": self.hosts.strike,
            "burst": self._strike_forkservers,
        }
        self._rng = random.Random(f"{self.seed} who")
        self._rest = random.Random(f"{self.seed} rest")

    def does(self, fault: Fault) -> bool:
        """Return whether the schedule has a fault."""
        return self.every_s[fault] > 0

    async def run(self) -> None:
        """Follow the schedule until cancelled; faults that take a while are finished first."""
        began = time.monotonic()
        under_way: dict[Fault, asyncio.Task[None]] = {}
        try:
            for moment, fault in schedule(self.seed, self.every_s):
                await asyncio.sleep(began + moment - time.monotonic())
                if fault == "forkserver":
                    await self._strike_forkserver()
                elif fault == "decoder":
                    if not await self._strike_decoder():
                        continue  # none is well
                elif wait_and_strike := self._waiting.get(fault):
                    await wait_and_strike()
                    # A fault that had to wait delays all others, so they do not come in a burst.
                    began = max(began, time.monotonic() - moment)
                else:
                    # One at a time: each poison kills three workers, and a job that
                    # is made meanwhile needs the store.
                    kind: Fault = "poison" if fault in POISONS else fault
                    kind = "store" if fault == "upload" else kind
                    if kind in under_way and not under_way[kind].done():
                        continue
                    under_way[kind] = asyncio.create_task(self._begin(fault))
                self.counts[fault] += 1
        finally:
            self._kill_stopped_decoders()
            await self.hosts.settle()
            for task in under_way.values():
                await task

    async def _begin(self, fault: Fault) -> None:
        """Run a slow fault, during which others happen."""
        if fault in POISONS:
            await self._poison(fault, self.poisonings.num_sent)
        else:
            await self.acts[fault]()

    async def _strike(self, kind: Literal["kill", "stop"]) -> None:
        """Kill or stop a process of a worker that is well, as soon as there is one.

        If the model of the worker is split, any rank may be struck.

        This waits until a killed worker is back, and a moment longer: if it were killed again at
        the same requests, the service would blame those. It does not wait for a stopped worker.
        """
        while not (well := await self._well(kind)) or not self._strike_one_of(well, kind):
            while not await self._well(kind):  # noqa: ASYNC110  # the service tells who asks
                await asyncio.sleep(_WAIT_S)
            await asyncio.sleep(self._rest.uniform(0.0, self.every_s[kind]))

    async def _strike_forkserver(self) -> None:
        """Kill or stop the forkserver, in turns, as soon as it is well, even if workers are not."""
        while (forkserver := await self._forkserver()).state != "ready":  # noqa: ASYNC110  # as above
            await asyncio.sleep(_WAIT_S)
        is_kill = self.counts["forkserver"] % 2 == 0
        self._hit(_recovery_of(forkserver), forkserver.pid, is_kill=is_kill)

    async def _strike_forkservers(self) -> None:
        """Kill the forkserver and its successors as soon as they are there, ready or not."""
        last = -1
        for number in range(BURST):
            forkserver = await self._forkserver(after=last)
            last = forkserver.incarnation
            is_last = number == BURST - 1
            recovery = _recovery_of(forkserver)
            self._hit(recovery, forkserver.pid, is_kill=True, is_watched=is_last)

    async def _forkserver(self, after: int = -1) -> ForkserverState:
        """Return the forkserver as soon as there is one `after` an incarnation."""
        while True:
            found = (await self.watch.seen()).forkserver
            if found is not None and found.incarnation > after:
                return found
            await asyncio.sleep(_WAIT_S)

    async def _strike_decoder(self) -> bool:
        """Kill or stop a decoder that has worked, in turns; return whether there was one.

        There is none until the last one struck is back: the service blames inputs that have killed
        two decoders.
        """
        if any(each.kind == "decoder" for each in self.watch.pending):
            return False
        workers = (await self.watch.seen()).workers
        ready = [worker for worker in workers if worker.state == "ready"]
        well = [(worker, each) for worker in ready for each in worker.decoders if each.num_decoded]
        if not well:
            return False
        worker, decoder = self._rng.choice(well)
        recovery = Recovery(
            kind="decoder",
            worker=decoder_name(worker, decoder),
            incarnation=decoder.pid,
            host=worker.host,
        )
        return self._hit(recovery, decoder.pid, is_kill=self.counts["decoder"] % 2 == 0)

    def _kill_stopped_decoders(self) -> None:
        """Kill those that are still stopped: without work the service does not notice them."""
        for each in self.watch.pending:
            if each.kind == "decoder" and each.noticed is None:
                for process in each.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    async def _well(self, kind: Literal["kill", "stop"]) -> list[WorkerState]:
        """Return workers that are ready and not struck; none while others are not back."""
        if any(each.kind in ("kill", kind) for each in self.watch.pending):
            return []
        workers = (await self.watch.seen()).workers
        struck = {each.worker for each in self.watch.pending}  # names of hosts among them
        return [
            worker
            for worker in workers
            if worker.state == "ready" and worker.pids and not struck & {worker.name, worker.host}
        ]

    def _strike_one_of(self, well: Sequence[WorkerState], kind: Literal["kill", "stop"]) -> bool:
        worker = self._rng.choice(well)
        rank, pid = self._rng.choice(list(worker.pids.items()))
        recovery = Recovery(
            kind=kind,
            worker=worker.name,
            incarnation=worker.incarnation,
            rank=rank,
            host=worker.host,
        )
        family = (*worker.pids.values(), *(each.pid for each in worker.decoders))
        return self._hit(recovery, pid, *family, is_kill=kind == "kill")

    def _hit(
        self,
        recovery: Recovery,
        pid: int,
        *family: int,
        is_kill: bool,
        is_watched: bool = True,
    ) -> bool:
        """Kill or stop a process, and watch it with its family; return False if it has ended."""
        try:
            recovery.processes = [psutil.Process(each) for each in {pid, *family}]
            recovery.began = time.monotonic()
            os.kill(pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
        except (ProcessLookupError, psutil.NoSuchProcess):  # it died of a poison since
            return False
        if is_watched:
            self.watch.add(recovery)
        return True

    async def _poison(self, fault: Fault, index: int) -> None:
        question = self.questions[index % len(self.questions)]
        poison = POISONS[fault]
        number = _FIRST_POISON + index
        place = PLACES[self.counts[fault] % len(PLACES)]
        query = f"?{PARAMETER}={place}-{poison.how}-{index}"
        request = question.request(number, query, self.key)
        self.poisonings.num_sent += 1
        if await self._ask(number, request, *poison.answer):
            if not self.keeps_quarantine or not poison.is_deadly:
                self.poisonings.right += 1
            elif await self._ask(number, request, 422, "quarantined"):
                self.poisonings.right += 1
                self.poisonings.num_quarantined += question.num_instances

    async def _ask(self, number: int, request: bytes, status: int, code: str) -> bool:
        """Return whether a request has the answer that it should have; count it if not."""
        tally = self.tally
        while True:
            self.poisonings.num_attempts += 1
            try:
                opened = await self.open(self.address, tally.note_stray)
                with contextlib.closing(opened) as connection:
                    answer = await connection.ask(request, self.timeout_s + PATIENCE_S)
            except (OSError, NoAnswerError) as error:
                tally.lost += 1
                tally.note(f"poison {number} is lost: {error!r}")
                return False
            if not is_refusal(answer.status, answer.body):
                break
            self.poisonings.refused[answer.status] += 1
            await asyncio.sleep(_RETRY_S)
        found = problem_code(answer.body)
        if (answer.status, found, answer.request_id) == (status, code, b"%d" % number):
            return True
        if answer.status == 504:  # three workers had no time to come back
            tally.expired += 1
            return False
        tally.wrong += 1
        tally.note(
            f"poison {number}: expected {status} {code}, found {answer.status} {found} "
            f"{answer.body[:200]!r}"
        )
        return False


def _recovery_of(forkserver: ForkserverState) -> Recovery:
    return Recovery(kind="forkserver", worker=FORKSERVER, incarnation=forkserver.incarnation)
