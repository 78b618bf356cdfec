"""Ranks for tests: this process leads, and others follow, over pipes."""

import multiprocessing
import pickle
import queue
import threading
from contextlib import contextmanager, suppress

import msgspec
import torch

from models.base import Model
from models.errors import ModelError
from models.spec import Placement
from models.split.network import load_model, serve

_DEADLINE_S = 60.0


class PipeRanks:
    """Messages in the order in which they are sent, and an end when a rank lets another go."""

    split = "pipeline"
    device = torch.device("cpu")

    def __init__(self, rank, connections):
        self.rank = rank
        self.size = len(connections)
        self._connections = connections
        self._outgoing = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, to, message, tensors=()):
        data = pickle.dumps([tensor.clone() for tensor in tensors])
        self._outgoing.put((to, [msgspec.msgpack.encode(message), data]))

    def receive(self, source, timeout_s=None):
        if not self._connections[source].poll(timeout_s or _DEADLINE_S):
            raise TimeoutError
        message, data = self._connections[source].recv()
        if message is None:
            raise EOFError
        return msgspec.msgpack.decode(message), pickle.loads(data)  # noqa: S301 - our own

    def let_go(self):
        """End what the next rank serves; it does so for the one after it."""
        if self.rank + 1 < self.size:
            self._outgoing.put((self.rank + 1, [None, None]))

    def _send_all(self):
        while True:
            to, parts = self._outgoing.get()
            self._connections[to].send(parts)


class Group:
    """Followers, each a process, that load and serve one network after the other."""

    def __init__(self, size):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["workers.preload"])
        pipes = {(a, b): context.Pipe() for a in range(size) for b in range(a)}
        ends = [
            [None if a == b else pipes[max(a, b), min(a, b)][a < b] for b in range(size)]
            for a in range(size)
        ]
        self.ranks = PipeRanks(0, ends[0])
        self._jobs = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            context.Process(target=_follow, args=(theirs, rank, ends[rank]), daemon=True).start()
            theirs.close()
            self._jobs.append(ours)

    @contextmanager
    def loaded(self, build, weights=None, example=(), size=2, **attributes):
        """A model that has loaded a network on so many ranks, until the block ends."""
        jobs = self._jobs[: size - 1]
        for job in jobs:
            job.send((size, build, weights, example, attributes))
        self.ranks.size = size
        model = _Network(build, weights, example, attributes)
        model.ranks = self.ranks
        try:
            load_model(model, Placement(devices=("cpu",) * self.ranks.size, split="pipeline"))
            yield model
        finally:
            self.ranks.let_go()
            model.parts = [job.recv() for job in jobs]

    def stop(self):
        for job in self._jobs:
            job.close()


class _Network(Model):
    def __init__(self, build, weights, example, attributes):
        self._load = (build, weights, example)
        vars(self).update(attributes)

    def load(self, placement):
        build, weights, example = self._load
        self.network = self.load_network(build, weights, placement, example=example)
        assert self.ranks.rank == 0


def _follow(jobs, rank, ends):
    torch.set_num_threads(1)
    ranks = PipeRanks(rank, ends)
    while True:
        try:
            ranks.size, *job = jobs.recv()
        except EOFError:
            return
        model = _Network(*job)
        model.ranks = ranks
        part = None
        try:
            load_model(model, Placement(devices=("cpu",) * ranks.size, split="pipeline"))
            part = model.split_network.part
            serve(model, lambda: None)
        except ModelError:
            with suppress(EOFError):
                ranks.receive(rank - 1)  # to be let go
        except EOFError:
            pass
        finally:
            ranks.let_go()
            jobs.send(part)
