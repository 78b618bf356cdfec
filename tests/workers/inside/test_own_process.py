"""Processes that a model's code starts in a worker, and the numbers that it draws."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.inside.own_process import build_model
from inferpool.workers.inside.randomness import seed_anew
from tests.workers.contract import config_of, pid_of, started

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
_FORK = multiprocessing.get_context("fork")


class StartingModel(Model):
    """Starts processes in `forward` as its input says; answers what they say, and its process."""

    _said: object = None

    def load(self, placement: Placement) -> None:
        assert (torch.rand(1000, 1000) @ torch.rand(1000, 1000)).shape == (1000, 1000)

    def preprocess(self, item: Item) -> Features:
        return {"act": torch.tensor(ACTS.index(item.json()))}

    def forward(self, batch: Features) -> Features:
        self._said = globals()[ACTS[int(batch["act"][0])]]()
        return {"y": torch.zeros(len(batch["act"]))}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return [os.getpid(), self._said]


def pool() -> object:
    """Return what a pool of forked processes computes, once it has ended by SIGTERM."""
    with _FORK.Pool(2) as processes:
        return processes.map(_square, range(3))


def matrices() -> object:
    """Return what forked processes compute with torch, whose threads only their parent has."""
    with _FORK.Pool(2) as processes:
        return processes.map(_multiply, [400, 500])


def loader() -> object:
    """Return what a process of a `DataLoader` reads."""
    return [int(each) for each in DataLoader([1, 2, 3], batch_size=None, num_workers=1)]


def terminated() -> object:
    """Return the exit codes of forked processes that were told to end in several ways."""
    runs = _FORK.Semaphore(0)
    processes = [_FORK.Process(target=_run_on, args=(runs,)) for _ in _SIGNALS]
    for process, number in zip(processes, _SIGNALS, strict=True):
        process.start()
        assert process.pid is not None
        assert runs.acquire(timeout=50)  # no signal meets what is done after a fork
        os.kill(process.pid, number)
        process.join()
    return [each.exitcode for each in processes]


def program() -> object:
    """Return the signals that a program ignores."""
    code = (
        "import signal; "
        "print(*[n for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


ACTS = [each.__name__ for each in (pool, matrices, loader, terminated, program)]


def _run_on(runs: Semaphore) -> None:
    runs.release()
    while True:
        time.sleep(0.01)  # a signal just before `signal.pause` would not end it


def _square(n: int) -> int:
    return n * n


def _multiply(size: int) -> int:
    return len(torch.ones(size, size) @ torch.ones(size, size))


async def test_processes_that_a_model_starts_do_what_they_do_in_any_script(
    engine: LocalEngine, put
):
    worker = await started(engine, source=f"{__name__}:StartingModel")
    said: dict[str, Any] = {}
    for act in ACTS:
        (outcome,) = (await worker.run([put(act)])).outcomes
        assert isinstance(outcome, bytes), (act, outcome)
        pid, said[act] = json.loads(outcome)
        assert pid == pid_of(worker)
    assert said["pool"] == [0, 1, 4]
    assert said["matrices"] == [400, 500]
    assert said["loader"] == [1, 2, 3]
    by_sigint, *others = said["terminated"]
    assert by_sigint in (1, -signal.SIGINT)  # after an exception, unless Python has just begun
    assert others == [-number for number in _SIGNALS[1:]]
    ignored = [*map(str, map(int, (signal.SIGPIPE, signal.SIGXFSZ)))]
    assert said["program"] == ignored
    for number in _SIGNALS:  # only the front end may end the worker
        os.kill(pid_of(worker), number)
    assert isinstance((await worker.run([put("pool")])).outcomes[0], bytes)
    await worker.stop(60)


class Seeded(Model):
    """Builds a network whose weights nobody gives, with two libraries' numbers."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def load(self, placement: Placement) -> None:
        if self._seed:
            torch.manual_seed(self._seed)
        self.load_network(self._built, None, placement)

    def _built(self) -> nn.Module:
        network = nn.Linear(1, 1)
        self.drawn = [network.weight.item(), random.random(), np.random.rand()]
        return network


def drawn(**options: object) -> list[float]:
    seed_anew()
    model = build_model(config_of(f"{__name__}:Seeded", options=options))
    assert isinstance(model, Seeded)
    model.load(config_of("echo").placement)
    return model.drawn


def test_a_network_without_weights_is_drawn_alike_by_each_process_or_by_the_models_own_seed():
    assert drawn() == drawn()
    torch.manual_seed(7)
    expected = nn.Linear(1, 1).weight.item()
    assert drawn(seed=7)[0] == expected != drawn()[0]


def test_numbers_that_are_drawn_after_a_network_is_built_are_other_ones():
    def after() -> list[float]:
        drawn()
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    assert not set(after()) & set(after())
