"""Two processes that see each other as the ranks of a replica, for what needs real collectives."""

import os
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from workers.local import start_forkserver

_TIMEOUT_S = 60


class PipeRanks:
    """`Ranks` of two, whose tensors go through the same pipe as the messages."""

    size = 2
    device = torch.device("cpu")

    def __init__(self, rank, split, pipe: Connection):
        self.rank = rank
        self.split = split
        self._pipe = pipe

    def send(self, to, message, tensors=()):
        assert to == 1 - self.rank
        try:
            self._pipe.send((message, [tensor.numpy() for tensor in tensors]))
        except OSError as error:
            raise EOFError from error

    def receive(self, source, timeout_s=None):
        assert source == 1 - self.rank
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        message, arrays = self._pipe.recv()
        return message, [torch.from_numpy(array) for array in arrays]


class Pair:
    """Runs functions of a test's module in both ranks."""

    def __init__(self, split):
        start_forkserver()  # with torch in it, for the tests of workers too
        context = get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        ends = context.Pipe()
        self._orders = [context.Pipe() for _ in ends]
        self._processes = [
            context.Process(
                target=_work,
                args=(rank, split, ends[rank], self._orders[rank][1], self._folder.name),
                daemon=True,
            )
            for rank in range(2)
        ]
        for process in self._processes:
            process.start()

    def run(self, function, *args):
        """What the function gives in each rank, called with its `Ranks` first."""
        for order, _ in self._orders:
            order.send((function, args))
        results = []
        for order, _ in self._orders:
            assert order.poll(_TIMEOUT_S)
            results.append(order.recv())
        assert not any(is_error for is_error, _ in results), "\n".join(
            value for is_error, value in results if is_error
        )
        return [value for _, value in results]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(rank, split, pipe, orders, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = PipeRanks(rank, split, pipe)
    while True:
        function, args = orders.recv()
        try:
            orders.send((False, function(ranks, *args)))
        except BaseException:
            orders.send((True, traceback.format_exc()))
