"""Processes that make jobs and compute them: `PLACE LOG JOBS MADE LEASE_S DIES_AFTER...`.

Each makes `MADE` jobs, all again at each start, and says which were accepted. It notes each
instance that is computed in a file: its workers are fakes. It ends when all `JOBS` jobs are over.

It kills itself soon after it has made `DIES_AFTER` steps: accepted jobs and computed batches. So
its death does not depend on how fast the machine is. If less is left to do, it dies at the end.
With a negative number it lives.

One follows the other, and a line tells the exit code of each. All are forked from a process that
has imported what they need: the import costs more than the life of one.
"""

import asyncio
import importlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_context

from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.jobs.records import (
    STATES,
    UNFINISHED,
    NewJob,
    StoredInstance,
    StoreLimits,
)
from inferpool.service.parts.jobs.runner import LeasePeriods
from inferpool.service.parts.jobs.webhooks import Webhooks
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine
from tests.service.pools import ready_pool

LIMITS = StoreLimits(retention_s=1e6, max_jobs=1000, max_bytes=2**30)
SIZES = (1, 7, 70)
"""Instances of the jobs, in turn."""
MOST_S = 300
"""Seconds after which a process that hangs is ended."""


def payloads(job: int) -> Iterator[bytes]:
    """Yield the payloads of a job; those of every third one fill files."""
    for number in range(SIZES[job % len(SIZES)]):
        yield f"{job} {number}".encode().ljust(16_000 if job % 3 == 1 else 0)


def answer_to(payload: bytes) -> bytes:
    return b'"%b"' % payload.rstrip()[::-1]


class Fate:
    """Kills this process after some steps, at a random moment of the next one."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        if num_left == 0:
            self._die_soon()

    def step(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._die_soon()

    def end(self) -> None:
        """Die now if that is to come still."""
        if self._num_left > 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _die_soon(self) -> None:
        # The process cannot exit before: it waits for this thread.
        threading.Timer(random.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()


async def compute(engine: FakeEngine, arena: Arena, log: int, fate: Fate) -> None:
    """Answer each batch after a moment, and note it."""
    while True:
        for worker in engine.started:
            while worker.batches:
                items, _ = worker.batches[0]
                found = [arena.read(item.offset, item.num_bytes) for item in items]
                os.write(log, b"".join(payload.rstrip() + b"\n" for payload in found))
                worker.answer([answer_to(payload) for payload in found])
                fate.step()
        await asyncio.sleep(random.uniform(0, 0.004))


async def live(
    place: str, log: str, num_jobs: int, num_made: int, lease_s: float, fate: Fate
) -> None:
    arena, engine = Arena(1 << 22), FakeEngine()
    pool = await ready_pool(engine, arena, 2)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    computing = asyncio.create_task(compute(engine, arena, descriptor, fate))
    periods = LeasePeriods(lease_s=lease_s, renew_s=0.3)
    jobs = Jobs(place, LIMITS, {"m": pool}, "m", Webhooks((), b""), periods)
    jobs.start()

    async def make(number: int) -> None:
        new = NewJob(id=f"{number}", model="m", body_digest="d", idempotency_key=f"{number}")
        await jobs.create(
            new, lambda: (StoredInstance(kind="bytes", payload=p) for p in payloads(number))
        )
        os.write(1, b"accepted %d\n" % number)
        fate.step()

    order = list(range(num_made))
    random.shuffle(order)
    for number in order:
        await make(number)
    states = STATES[len(UNFINISHED) :]
    while len(await jobs.jobs("", states, 1000, None)) < num_jobs:  # noqa: ASYNC110  # others end some
        await asyncio.sleep(0.1)
    fate.end()
    await jobs.stop()
    computing.cancel()
    await pool.stop(0)


def run(place: str, log: str, num_jobs: str, num_made: str, lease_s: str, dies_after: str) -> None:
    signal.alarm(MOST_S)
    fate = Fate(int(dies_after))
    asyncio.run(live(place, log, int(num_jobs), int(num_made), float(lease_s), fate))


if __name__ == "__main__":
    *arguments, counts = (*sys.argv[1:6], sys.argv[6:])
    for name in ("inferpool.service.parts.jobs.store.store", "psycopg"):
        importlib.import_module(name)
    for count in counts:
        process = get_context("fork").Process(target=run, args=(*arguments, count))
        process.start()
        process.join()
        os.write(1, b"ended %d\n" % (process.exitcode or 0))
        if process.exitcode not in (0, -signal.SIGKILL):
            break
