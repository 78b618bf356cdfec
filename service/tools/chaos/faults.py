"""The faults: what is done to which worker, decoder, forkserver or host, and when.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import psutil

from inferpool.service.tools.chaos.hosts import HostFaults
from inferpool.service.tools.chaos.load import PATIENCE_S, ChaosTally
from inferpool.service.tools.chaos.plan import Fault
from inferpool.service.tools.chaos.questions import Question, is_refusal, problem_code
from inferpool.service.tools.chaos.swaps import Swaps
from inferpool.service.tools.chaos.watch import FORKSERVER, Recovery, Watch, decoder_name
from inferpool.service.tools.trial.connection import Address, NoAnswerError, connected
from inferpool.service.tools.trial.health import DecoderState, WorkerState

PLACES = ("preprocess", "forward", "render")
"""Places where a poisoned input kills its worker: see `models.sources.poisonable`."""
PARAMETER = "inferpool_chaos"

_FIRST_POISON = 10**15
_RETRY_S = 0.1
_WAIT_S = 0.02


def schedule(seed: int, every_s: Mapping[Fault, float]) -> Iterator[tuple[float, Fault]]:
    """Yield for ever the next moment, in seconds from the beginning, and its fault.

    `every_s` has the mean time between two faults of a kind; 0 is never. Each comes after half to
    one and a half of it, so that it meets the service in any state.
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
    """Counts of the inputs that kill their workers."""

    num_sent: int = 0
    right: int = 0
    """Inputs answered with 500 `worker_crashed`, and with 422 `quarantined` when asked again."""
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
    swaps: Swaps
    hosts: HostFaults
    counts: Counter[Fault] = field(default_factory=Counter)
    poisonings: Poisonings = field(default_factory=Poisonings)
    _rng: random.Random = field(init=False)
    _rest: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Seed all that is left to chance."""
        self._rng = random.Random(f"{self.seed} who")
        self._rest = random.Random(f"{self.seed} rest")

    def does(self, fault: Fault) -> bool:
        """Return whether a fault is on the schedule at all."""
        return self.every_s[fault] > 0

    async def run(self) -> None:
        """Follow the schedule until cancelled; see a poisoning and a swap through."""
        began = time.monotonic()
        poisoning: asyncio.Task[None] | None = None
        swap: asyncio.Task[None] | None = None
        try:
            for moment, fault in schedule(self.seed, self.every_s):
                await asyncio.sleep(began + moment - time.monotonic())
                if fault == "forkserver":
                    await self._strike_forkserver()
                elif fault == "decoder":
                    if not await self._strike_decoder():
                        continue  # none is well
                elif fault == "swap":
                    if swap is not None and not swap.done():
                        continue
                    swap = asyncio.create_task(self.swaps.swap())
                elif fault == "host" or fault == "kill" or fault == "stop":
                    await (self.hosts.strike() if fault == "host" else self._strike(fault))
                    # What had to wait puts all else off, so that nothing comes in a burst.
                    began = max(began, time.monotonic() - moment)
                elif poisoning is not None and not poisoning.done():
                    continue  # one at a time: each costs three workers their lives
                else:
                    poisoning = asyncio.create_task(self._poison(self.counts[fault]))
                self.counts[fault] += 1
        finally:
            self._kill_stopped_decoders()
            await self.hosts.settle()
            for task in (poisoning, swap):
                if task is not None:
                    await task

    async def _strike(self, kind: Literal["kill", "stop"]) -> None:
        """Kill or stop a process of a worker that is well, as soon as there is one.

        If the model of the worker is split, any rank may be struck.

        This waits until a killed worker is back, and a moment longer: a worker killed again at the
        same requests would make the service blame those. It does not wait for a stopped worker.
        """
        while not (well := await self._well(kind)) or not self._strike_one_of(well, kind):
            while not await self._well(kind):  # noqa: ASYNC110  # the service tells who asks
                await asyncio.sleep(_WAIT_S)
            await asyncio.sleep(self._rest.uniform(0.0, self.every_s[kind]))

    async def _strike_forkserver(self) -> None:
        """Kill or stop the forkserver, in turns, as soon as it is well, whatever the workers do."""
        while True:
            with contextlib.suppress(OSError, NoAnswerError):
                forkserver = (await self.watch.look()).forkserver
                if forkserver is not None and forkserver.state == "ready":
                    break
            await asyncio.sleep(_RETRY_S)
        is_kill = self.counts["forkserver"] % 2 == 0
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            processes = [psutil.Process(forkserver.pid)]
            began = time.monotonic()
            os.kill(forkserver.pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
            recovery = Recovery(
                kind="forkserver",
                worker=FORKSERVER,
                incarnation=forkserver.incarnation,
                processes=processes,
                began=began,
            )
            self.watch.add(recovery)

    async def _strike_decoder(self) -> bool:
        """Kill or stop a decoder that has worked, in turns; return whether there was one.

        There is none until the one struck before is back: the service blames inputs that two
        decoders die of.
        """
        if any(each.kind == "decoder" for each in self.watch.pending):
            return False
        try:
            health = await self.watch.look()
        except (OSError, NoAnswerError):
            return False
        ready = [worker for worker in health.workers if worker.state == "ready"]
        well = [(worker, each) for worker in ready for each in worker.decoders if each.num_decoded]
        return bool(well) and self._strike_one_decoder_of(well)

    def _strike_one_decoder_of(self, well: Sequence[tuple[WorkerState, DecoderState]]) -> bool:
        worker, decoder = self._rng.choice(well)
        is_kill = self.counts["decoder"] % 2 == 0
        try:
            processes = [psutil.Process(decoder.pid)]
            began = time.monotonic()
            os.kill(decoder.pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
        except (ProcessLookupError, psutil.NoSuchProcess):  # it died of a poison since
            return False
        recovery = Recovery(
            kind="decoder",
            worker=decoder_name(worker, decoder),
            incarnation=decoder.pid,
            processes=processes,
            began=began,
            host=worker.host,
        )
        self.watch.add(recovery)
        return True

    def _kill_stopped_decoders(self) -> None:
        """Kill those that are still stopped: without work nobody misses them."""
        for each in self.watch.pending:
            if each.kind == "decoder" and each.noticed is None:
                for process in each.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    async def _well(self, kind: Literal["kill", "stop"]) -> list[WorkerState]:
        """Return workers that are ready and not struck; none while others have to come back."""
        if any(each.kind in ("kill", kind) for each in self.watch.pending):
            return []
        try:
            health = await self.watch.look()
        except (OSError, NoAnswerError):
            return []
        struck = {each.worker for each in self.watch.pending}  # names of hosts among them
        return [
            worker
            for worker in health.workers
            if worker.state == "ready" and worker.pids and not struck & {worker.name, worker.host}
        ]

    def _strike_one_of(self, well: Sequence[WorkerState], kind: Literal["kill", "stop"]) -> bool:
        worker = self._rng.choice(well)
        rank, pid = self._rng.choice(list(worker.pids.items()))
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        try:
            decoders = [each.pid for each in worker.decoders]
            processes = [psutil.Process(each) for each in (*worker.pids.values(), *decoders)]
            began = time.monotonic()
            os.kill(pid, number)
        except (ProcessLookupError, psutil.NoSuchProcess):  # it died of a poison since
            return False
        recovery = Recovery(
            kind=kind,
            worker=worker.name,
            incarnation=worker.incarnation,
            rank=rank,
            processes=processes,
            began=began,
            host=worker.host,
        )
        self.watch.add(recovery)
        return True

    async def _poison(self, index: int) -> None:
        question = self.questions[index % len(self.questions)]
        number = _FIRST_POISON + index
        place = PLACES[index % len(PLACES)]
        request = question.request(number, f"?{PARAMETER}={place}-{index}")
        self.poisonings.num_sent += 1
        if await self._ask(number, request, 500, "worker_crashed"):
            if not self.keeps_quarantine:
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
                async with connected(self.address, tally.note_stray) as connection:
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
