"""The ranks of a group, each a process as in a worker of so many devices, that load networks."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.failures import is_out_of_memory
from inferpool.models.base import Model, load_model
from inferpool.models.errors import ModelError, OutOfStepError, RankError
from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.spec import Placement, RankPart, Split, SplitReport
from inferpool.workers.host.forked import ForkedProcess
from inferpool.workers.host.local import start_forkserver
from inferpool.workers.ranks.follower import serve
from inferpool.workers.ranks.group import Group
from inferpool.workers.ranks.wiring import Wiring

_DEADLINE_S = 60.0
_EXPECTED = (ModelError, RankError, OutOfStepError, EOFError, TypeError, IndexError)
_MARK = "mark"


class RaisedError(Exception):
    """An error of a rank: its type and message, or its traceback if no test expects it."""

    def __init__(self, text: str, is_shortage: bool) -> None:
        super().__init__(text, is_shortage)
        self.is_shortage = is_shortage
        """True if memory was short."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class LoadedNetwork:
    """A network that the ranks have loaded: called here, computed by them."""

    processes: "RankProcesses"
    parts: list[RankPart]
    report: SplitReport
    num_bytes_read: list[int]
    """Bytes read of the checkpoint, by rank."""

    def __call__(self, *args, **kwargs):
        self.processes.order(0, _call, args, kwargs)
        return self.processes.result_of(0)

    def wait_for(self, rank: int) -> None:
        """Wait until this follower has stopped serving, though the lead has not let it go."""
        try:
            self.processes.result_of(rank)
        finally:
            self.processes.order(rank, _serve)


class RankProcesses(AbstractContextManager):
    """Processes that are connected to each other once, and load one network after the other.

    Args:
        size: Number of ranks.
        devices: Device of each rank; by default the CPU.
        split: The kind of split that they have groups for.
    """

    def __init__(self, size: int, devices: Sequence[str] = (), split: Split = "pipeline") -> None:
        start_forkserver()  # with torch in it, for the tests of workers too
        self.size = size
        self.devices = (*devices,) or ("cpu",) * size
        placement = Placement(devices=self.devices, split=split)
        wiring = Wiring(size)
        self._orders = []
        self._processes = []
        for rank in range(size):
            ours, theirs = Pipe()
            process = ForkedProcess(
                target=_work, args=(theirs, placement, wiring.ends_of(rank)), daemon=True
            )
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)
        wiring.close()

    def __exit__(self, *exc) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def order(self, rank: int, function, *args) -> None:
        """Have a rank call a function of a module, with its state first."""
        self._orders[rank].send((function, args))

    def result_of(self, rank: int):
        """Return what it gave, in the order of the orders."""
        assert self._orders[rank].poll(_DEADLINE_S)
        result = self._orders[rank].recv()
        if isinstance(result, Exception):
            raise result
        return result

    def run(self, function, *args) -> list:
        """Have all ranks call it at once."""
        ranks = range(len(self._orders))
        for rank in ranks:
            self.order(rank, function, *args)
        return [self.result_of(rank) for rank in ranks]

    @contextmanager
    def patched(self, target, value) -> Iterator[None]:
        """Set something else in a place in all of them, as pytest's `monkeypatch` does."""
        self.run(_patch, target, value)
        try:
            yield
        finally:
            self.run(_undo)

    @contextmanager
    def loaded(self, split, build, weights=None, example=(), **attributes) -> Iterator:
        """Have them load a network, and serve it until the block ends.

        Args:
            split: "pipeline" or "tensor".
            build: See `Model.load_network`, as the next two.
            weights: A file, or None.
            example: The network's arguments.
            attributes: To set on the model.

        Raises:
            RaisedError: The lead cannot load it; or, at the end, a follower could not serve it.
        """
        followers = range(1, len(self._orders))
        for rank in (0, *followers):
            self.order(rank, _load, split, build, weights, example, attributes)
        for rank in followers:
            self.order(rank, _serve)
        try:
            loaded = [self.result_of(rank) for rank in (0, *followers)]
            parts, reports, num_bytes_read = map(list, zip(*loaded, strict=True))
            assert reports == [reports[0]] * len(reports)
            yield LoadedNetwork(self, parts, reports[0], num_bytes_read)
        except BaseException:
            self.order(0, _let_go)
            for rank in (0, *followers):  # the next test must find nothing of this one
                self.order(rank, _mark)
                while True:
                    with suppress(RaisedError):
                        if self.result_of(rank) == _MARK:
                            break
            self.run(_forget)
            raise
        self.order(0, _let_go)
        self.result_of(0)
        errors = []
        for rank in followers:
            try:
                self.result_of(rank)
            except RaisedError as error:
                errors.append(error)
        self.run(_forget)
        for error in errors:
            raise error


class _LoadingModel(Model):
    def __init__(self, build, weights, example, attributes):
        self._load = (build, weights, example)
        vars(self).update(attributes)

    def load(self, placement):
        build, weights, example = self._load
        self.network = self.load_network(build, weights, placement, example=example)
        assert self.ranks.rank == 0


def _work(orders, placement, ends):
    torch.set_num_threads(1)
    group = Group(ends, placement)
    state = SimpleNamespace(
        group=group, placement=placement, model=None, patches=pytest.MonkeyPatch()
    )
    while True:
        try:
            function, args = orders.recv()
        except EOFError:
            return
        try:
            result = function(state, *args)
        except _EXPECTED as error:
            result = RaisedError(f"{type(error).__name__}: {error}", is_out_of_memory(error))
        except BaseException:
            result = RaisedError(traceback.format_exc(), is_shortage=False)
        orders.send(result)


def _load(state, split, build, weights, example, attributes):
    num_bytes, read = [], StoredWeights.read

    def counted(stored, name, *index):
        tensor = read(stored, name, *index)
        num_bytes.append(tensor.nbytes)
        return tensor

    state.group.split = split
    state.group.known_split = attributes.pop("known_split", None)
    state.group.room_bytes = attributes.pop("room_bytes", 0)
    model = _LoadingModel(build, weights, example, attributes)
    model._runtime = replace(model._runtime, ranks=state.group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredWeights, "read", counted)
        load_model(model, replace(state.placement, split=split))
    state.model = model
    network = model._runtime.split_network
    return network.part, network.report, sum(num_bytes)


def _patch(state, target, value):
    state.patches.setattr(target, value)


def _undo(state):
    state.patches.undo()


def _call(state, args, kwargs):
    args, kwargs = _moved((args, kwargs), state.group.device)
    with torch.inference_mode():
        return _moved(state.model.network(*args, **kwargs), "cpu")


def _moved(value, device):
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _serve(state):
    if state.model is not None:
        serve(state.model._runtime.split_network, lambda: None)
    state.group.let_go()


def _let_go(state):
    state.group.let_go()


def _mark(state):
    return _MARK


def _forget(state):
    """Drop the network, and messages that nobody has received."""
    state.model = None
    for source in state.group._ends.readers:
        with suppress(TimeoutError):
            while True:
                with suppress(EOFError):
                    state.group.receive(source, 0)
