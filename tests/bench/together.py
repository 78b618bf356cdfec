"""Runs work in processes that begin together, each with an interpreter of its own.

They import this file and that of the work. So this one imports nothing that they need not.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import TypeVar

from inferpool.service.tools.trial.load import LoadGenerator, LoadPlan
from inferpool.service.tools.trial.tally import LoadTally
from tests.load.generators import precise_loop

_START_S = 300.0
T = TypeVar("T")


def run_together(work: Callable[..., T], each: Sequence[object]) -> list[T]:
    """Run a function in a process of its own for each of some arguments; return the results.

    Before the argument it gets a barrier, where it waits once it is warm: all begin together.
    """
    context = get_context("spawn")
    begin = context.Barrier(len(each))
    with ProcessPoolExecutor(len(each), context, _keep, (begin,)) as processes:
        return list(processes.map(partial(_work, work), each))


def load_together(plans: Sequence[LoadPlan]) -> list[LoadTally]:
    """Load services by some plans at once, each from a process of its own."""
    return run_together(_generate, plans)


def _generate(begin: Barrier, plan: LoadPlan) -> LoadTally:
    begin.wait(_START_S)
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(LoadGenerator(plan).run())


def _keep(begin: Barrier) -> None:
    _work.begin = begin  # type: ignore[attr-defined]  # a pool hands none on with an argument


def _work(work: Callable[..., T], argument: object) -> T:
    return work(_work.begin, argument)  # type: ignore[attr-defined]  # as above
