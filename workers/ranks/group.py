"""Connects a rank of a split replica to the others. Worker processes only.

Messages go through private pipes; the tensors follow through `torch.distributed` (NCCL or gloo),
once both sides know their shapes. A rank that loses another one only waits: the front end sees each
death at once and ends the whole group.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from inferpool.models.accelerator.device import free_bytes, is_accelerator, select
from inferpool.models.accelerator.failures import is_out_of_memory
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.accelerator.order import OwnStream
from inferpool.models.base import Model
from inferpool.models.errors import OutOfStepError
from inferpool.models.runtime import NetworkToSplit, SplitNetwork
from inferpool.models.spec import Placement, Split, SplitReport
from inferpool.models.split.pipeline import load_pipeline
from inferpool.models.split.tensor import load_tensor_parallel
from inferpool.models.split.turnstile import BatchClock
from inferpool.workers.inside.own_process import build_model
from inferpool.workers.inside.randomness import new_number, seed_anew
from inferpool.workers.ranks.wiring import RankEnds
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.memory import available_bytes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_LOOPBACK = "lo"
_ON_HOST = "gloo"
"""Backend of `torch.distributed` for tensors in the host's memory."""
_FOREVER = timedelta(days=365)
"""Timeout of collectives, which must never apply: the front end ends ranks that hang."""
_KILLED_WITHIN_S = 5.0
"""Seconds that a rank waits after it has lost another; the front end kills it long before."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[object, list[tuple[str, tuple[int, ...]]]]).decode
_FAREWELL = b""
_SEED_KEY = "seed of the ranks"
"""Key of the seed in the ranks' common store."""


class Group:
    """Implementation of `models.split.ranks.Ranks` for this process."""

    def __init__(self, ends: RankEnds, placement: Placement) -> None:
        """Connect to the other ranks; this may initialise CUDA.

        Args:
            ends: Connections to them.
            placement: Placement of the replica; each rank has pinned itself to its own part.

        Raises:
            RuntimeError: The ranks cannot reach each other.
        """
        assert placement.split is not None, "only a split replica has several ranks"
        self.rank, self.size = ends.rank, ends.num_ranks
        self.split: Split = placement.split
        device = placement.devices[self.rank]
        self.device = torch.device(device)
        self.giving_way: Callable[[], AbstractContextManager[BatchClock]] = _alone
        """See `Ranks`. A loop that computes several batches at once replaces it."""
        self.known_split: SplitReport | None = None
        self.room_bytes = 0
        self._ends = ends
        store = torch.distributed.FileStore(str(ends.meeting), ends.num_ranks)  # type: ignore[attr-defined]  # its module does not export it
        self._under_way: SimpleQueue[tuple[dist.Work | None, Tensor]] = SimpleQueue()
        self._num_sharing = placement.devices.count(device)
        backend = backend_for(placement.devices)
        is_apart = is_accelerator(self.device)
        self._is_staged = is_apart and backend == _ON_HOST
        select(self.device)
        # A transfer waits for the other rank, and what a stream is told later waits for it. So no
        # transfer goes to a stream that computes, and no two kinds of transfer to the same one.
        self._sending, self._receiving, self._keeping = (OwnStream(self.device) for _ in range(3))
        # The name of the host may not resolve to an address.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=_FOREVER,
                device_id=None if backend == _ON_HOST else self.device,
            )
            seed_anew(_agreed_number(self.rank, store))
        except RuntimeError as error:
            raise RuntimeError(
                f"the ranks of a replica cannot meet over the loopback interface {_LOOPBACK!r}: "
                f"{error}; is it up (ip link set lo up)?"
            ) from error
        num_ways = 1 + max(way_from(rank, self.split, self.size) for rank in range(self.size))
        self._ways = [
            None if backend == _ON_HOST else self._way_of_its_own() for _ in range(num_ways)
        ]
        """Groups for transfers; None is the default group."""
        threading.Thread(target=self._keep_until_arrived, name="keep-sent", daemon=True).start()

    def build_model(self, config: WorkerConfig) -> Model:
        """Build the model; this rank is to load its part of it.

        Raises:
            ModelError: It cannot be built.
        """
        model = build_model(config)
        self.known_split = config.known_split
        is_apart = is_accelerator(self.device)
        free = free_bytes(self.device) if is_apart else available_bytes()
        self.room_bytes = free // self._num_sharing  # ranks that share a device share it equally
        model._runtime = replace(model._runtime, ranks=self)
        return model

    def load(self, network: NetworkToSplit) -> SplitNetwork:
        """Load this rank's part of a network."""
        load = load_tensor_parallel if self.split == "tensor" else load_pipeline
        return load(self, network)

    def send(self, to: int, message: object, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message, and tensors with it, to another rank; do not wait for their receipt."""
        sent = [self._outgoing(tensor) for tensor in tensors]
        made = self._sending.mark()
        shapes = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in sent]
        try:
            self._ends.writers[to].send_bytes(_encode((message, shapes)))
            with self._sending.used():
                self._sending.follow(made)
                for tensor in sent:
                    if tensor.numel():
                        work = dist.isend(tensor, to, group=self._way(self.rank))
                        self._under_way.put((work, tensor))
        except torch.AcceleratorError:
            raise
        except (OSError, RuntimeError) as error:
            self._lose(to, error)

    def receive(self, source: int, timeout_s: float | None = None) -> tuple[object, list[Tensor]]:
        """Wait for the next message of another rank; its tensors come on this rank's device."""
        reader = self._ends.readers[source]
        try:
            if not reader.poll(timeout_s):
                raise TimeoutError(f"no message of rank {source} within {timeout_s:g} s")
            frame = reader.recv_bytes()
            if frame != _FAREWELL:
                message, shapes = _decode(frame)
                return message, [self._incoming(source, *shape) for shape in shapes]
        except TimeoutError:
            raise
        except (EOFError, OSError, RuntimeError) as error:
            if is_out_of_memory(error):  # what it has no place for cannot be received
                text = f"rank {self.rank} has no memory for what rank {source} sends: {error}"
                raise OutOfStepError(text) from error
            if isinstance(error, torch.AcceleratorError):
                raise
            self._lose(source, error)
        raise EOFError(f"rank {source} has no more calls")

    def let_go(self) -> None:
        """Announce to the higher ranks that this rank sends no more calls."""
        for rank, writer in self._ends.writers.items():
            if rank < self.rank:
                continue
            try:
                writer.send_bytes(_FAREWELL)
            except OSError as error:
                logger.debug("rank %d is gone before it was let go: %s", rank, error)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to("cpu" if self._is_staged else self.device)
        return tensor.contiguous()

    def _incoming(self, source: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Receive a tensor and wait for it, so that the time it takes is this call's.

        No other work on the device delays it.
        """
        device = "cpu" if self._is_staged else self.device
        with self._receiving.used():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if tensor.numel():
                dist.recv(tensor, source, group=self._way(source))
            tensor = tensor.to(self.device)
            arrived = self._receiving.finish()
        self._receiving.follow(arrived, [tensor])
        return tensor

    def _way(self, source: int) -> dist.ProcessGroup | None:
        return self._ways[way_from(source, self.split, self.size)]

    def _way_of_its_own(self) -> dist.ProcessGroup:
        group = dist.new_group(timeout=_FOREVER)
        assert not isinstance(group, int), "every rank is in it"
        return group

    def _keep_until_arrived(self) -> None:
        """Hold sent tensors until they have arrived. Runs in a thread, since it must wait.

        NCCL's `wait` returns at once and has the thread's stream wait: here one of its own.
        """
        select(self.device)  # a thread begins on the first device, where it must take no memory
        while True:
            work, tensor = self._under_way.get()
            if work is not None:
                with contextlib.suppress(RuntimeError), self._keeping.used():  # a rank is gone
                    work.wait()
                    self._keeping.finish()
            del work, tensor

    def _lose(self, rank: int, error: Exception) -> NoReturn:
        """Wait to be killed: the front end knows of the loss, and reports its cause better."""
        level = logging.DEBUG if isinstance(error, EOFError | OSError) else logging.ERROR
        logger.log(level, "rank %d cannot be reached: %s", rank, error)
        time.sleep(_KILLED_WITHIN_S)
        os._exit(1)


def _agreed_number(rank: int, store: "Store") -> int:
    """Return the seed of this group: what all of its ranks draw must be the same."""
    if rank == 0:
        store.set(_SEED_KEY, str(new_number()))
    return int(store.get(_SEED_KEY))


def _alone() -> AbstractContextManager[BatchClock]:
    """Return a context that does nothing: no other batch is computed."""
    return nullcontext(BatchClock())


def way_from(source: int, split: Split, size: int) -> int:
    """Return the number of the group that a rank's tensors travel in, from 0.

    NCCL runs the transfers of a group one after the other, and a send ends when it is received. So
    the stages of a pipeline take turns with two groups, and the last of an odd number has a third:
    what a rank sends never waits for what it receives. Of a tensor-parallel network only the lead
    sends tensors. Its collectives are in the default group.
    """
    if split == "tensor":
        return 0
    return 2 if size % 2 and source == size - 1 else source % 2


def backend_for(devices: Sequence[str]) -> str:
    """Return the backend of `torch.distributed` for these devices.

    NCCL does not support two ranks on one GPU: these use gloo, through the host's memory.
    """
    accelerator = accelerator_of(devices[0])
    has_each_its_own = len(set(devices)) == len(devices)
    return accelerator.collectives if accelerator and has_each_its_own else _ON_HOST
