"""The ranks of a pipeline as threads, on devices that only note the order of what they are told.

The code that runs is that of real ranks (`Group`, `Pipeline`, `ModelLock`, `OverlappingBatches`,
`OwnStream`); only the lowest seams are stand-ins: `torch.distributed`, the pipes, and streams and
events. No device waits for anything here. What would have to wait for what is kept as a graph, in
which a circle is a deadlock.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import inferpool.models.accelerator.order
import inferpool.models.split.turnstile
import inferpool.workers.ranks.group
import inferpool.workers.ranks.lead
from inferpool.models.accelerator.order import OwnStream
from inferpool.models.spec import Placement, RankPart, SplitReport
from inferpool.models.split.pipeline import Pipeline
from inferpool.models.split.turnstile import FairLock
from inferpool.workers.ranks.group import Group
from inferpool.workers.ranks.lead import ModelLock, OverlappingBatches
from inferpool.workers.ranks.wiring import RankEnds

StreamKey = tuple[object, ...]
Channels = Literal["one for each group", "one for each pair", "the caller's"]
"""The stream on which a backend runs transfers: those of NCCL's group in torch 2.15 or with
`device_id`; those of its lazy mode; and those of an operation that is not asynchronous."""

_DEADLINE_S = 60.0
_rank_of_thread: ContextVar[int] = ContextVar("rank_of_thread")


class Order:
    """A graph of all that happens, in which each thing waits for others. Nodes are numbers."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.names: list[str] = []
        self.waits_for: list[set[int]] = []
        self.num_let_in = 0
        self.changed = threading.Condition()
        self._last_on: dict[StreamKey, int] = {}
        self._num_kept: dict[int, int] = defaultdict(int)
        self._local = threading.local()
        self._transfers: dict[tuple[object, ...], list[tuple[int, int]]] = {}

    @property
    def stream(self) -> StreamKey:
        """The stream of the calling thread."""
        stream: StreamKey | None = getattr(self._local, "stream", None)
        return stream or (_rank_of_thread.get(), "default")

    @contextmanager
    def on(self, stream: StreamKey) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def host(self, name: str, *after: int | None) -> int:
        """Note what the calling thread does, after what it did before and after other nodes."""
        node = self._node(name, getattr(self._local, "node", None), *after)
        self._local.node = node
        return node

    def device(self, name: str, stream: StreamKey, *after: int | None) -> int:
        """Note what the calling thread tells a stream."""
        with self.changed:
            node = self._node(
                name, self._last_on.get(stream), getattr(self._local, "node", None), *after
            )
            self._last_on[stream] = node
            return node

    def last_on(self, stream: StreamKey) -> int | None:
        return self._last_on.get(stream)

    def transfer(self, kind: str, peers: tuple[int, int], group: int, rank: int) -> int:
        """Note a send or a receipt, which ends when both have begun; return its end."""
        channel: StreamKey = (rank, "group", group)
        if self.channels == "one for each pair":
            channel = (*channel, *sorted(peers))
        elif self.channels == "the caller's":
            channel = self.stream
        name = f"{kind} {peers[0]}->{peers[1]} in group {group}"
        begin = self.device(f"begin to {name}", channel, self.last_on(self.stream))
        end = self.device(name, channel)
        with self.changed:
            mine, theirs = (
                self._transfers.setdefault((each, peers, group), []) for each in _both(kind)
            )
            mine.append((begin, end))
            if len(theirs) >= len(mine):
                other_begin, other_end = theirs[len(mine) - 1]
                self.waits_for[end].add(other_begin)
                self.waits_for[other_end].add(begin)
        return end

    def note_kept(self, rank: int, change: int) -> None:
        with self.changed:
            self._num_kept[rank] += change
            self.changed.notify_all()

    def settle(self) -> None:
        """Wait until the thread that keeps sent tensors has waited for each: it does so early."""
        rank = _rank_of_thread.get()
        with self.changed:
            assert self.changed.wait_for(lambda: not self._num_kept[rank], _DEADLINE_S)

    def let_in(self) -> None:
        with self.changed:
            self.num_let_in += 1
            self.changed.notify_all()

    def circle(self) -> list[str]:
        """Return the names of things that wait for each other in a circle; empty without one."""
        state = [0] * len(self.names)
        for start in range(len(self.names)):
            path = [(start, iter(self.waits_for[start]))] if not state[start] else []
            state[start] = state[start] or 1
            while path:
                node, rest = path[-1]
                after = next(rest, None)
                if after is None:
                    state[node] = 2
                    path.pop()
                elif state[after] == 1:
                    nodes = [each for each, _ in path]
                    return [self.names[each] for each in nodes[nodes.index(after) :]]
                elif not state[after]:
                    state[after] = 1
                    path.append((after, iter(self.waits_for[after])))
        return []

    def _node(self, name: str, *after: int | None) -> int:
        with self.changed:
            self.names.append(name)
            self.waits_for.append({each for each in after if each is not None})
            return len(self.names) - 1


def _both(kind: str) -> tuple[str, str]:
    return ("send", "receive") if kind == "send" else ("receive", "send")


@dataclass
class NotedDistributed:
    """Stands in for `torch.distributed`, for all ranks at once."""

    order: Order
    sent: dict[tuple[int, int, int], Queue[Tensor]] = field(default_factory=dict)
    num_groups: dict[int, int] = field(default_factory=dict)

    def init_process_group(self, *args: object, **kwargs: object) -> None:
        pass

    def new_group(self, **kwargs: object) -> SimpleNamespace:
        rank = _rank_of_thread.get()
        self.num_groups[rank] = number = self.num_groups.get(rank, 0) + 1
        return SimpleNamespace(number=number)

    def isend(self, tensor: Tensor, to: int, group: SimpleNamespace) -> "NotedWork":
        self.order.settle()
        rank = _rank_of_thread.get()
        end = self.order.transfer("send", (rank, to), group.number, rank)
        self.order.note_kept(rank, 1)
        self._sent(rank, to, group).put(tensor.clone())
        return NotedWork(self.order, rank, end)

    def recv(self, tensor: Tensor, source: int, group: SimpleNamespace) -> None:
        self.order.settle()
        rank = _rank_of_thread.get()
        end = self.order.transfer("receive", (source, rank), group.number, rank)
        self.order.device("wait for what is received", self.order.stream, end)
        tensor.copy_(self._sent(source, rank, group).get(timeout=_DEADLINE_S))

    def _sent(self, source: int, to: int, group: SimpleNamespace) -> Queue[Tensor]:
        return self.sent.setdefault((source, to, group.number), Queue())


@dataclass
class NotedWork:
    """The handle of a send: to wait for it has the thread's stream wait, as NCCL's does."""

    order: Order
    rank: int
    end: int

    def wait(self) -> None:
        _rank_of_thread.set(self.rank)
        self.order.device("wait for what is sent", self.order.stream, self.end)
        self.order.note_kept(self.rank, -1)


class NotedPipe:
    """Both ends of a pipe between two ranks."""

    def __init__(self, order: Order, waits: Callable[[], None]) -> None:
        self._order = order
        self._waits = waits
        self._frames: Queue[tuple[bytes, int]] = Queue()

    def send_bytes(self, frame: bytes) -> None:
        self._frames.put((frame, self._order.host("message")))

    def poll(self, timeout_s: float | None) -> bool:
        return True

    def recv_bytes(self) -> bytes:
        self._waits()
        frame, node = self._frames.get(timeout=_DEADLINE_S)
        self._order.host("receipt of a message", node)
        return frame


class NotedStage(nn.Module):
    """A stage that adds one; it is one kernel."""

    def __init__(self, order: Order, rank: int, size: int) -> None:
        super().__init__()
        self._order = order
        self._name = f"stage {rank}"
        self._is_last = rank == size - 1

    def forward(self, x: Tensor) -> object:
        self._order.settle()
        self._order.device(self._name, self._order.stream)
        return x + 1 if self._is_last else (x + 1,)


def order_of_pipeline(
    patch: pytest.MonkeyPatch,
    folder: Path,
    *,
    num_ranks: int,
    num_batches: int,
    num_pieces: int,
    channels: Channels = "one for each group",
    all_in_flight: bool = True,
) -> Order:
    """Compute batches in a pipeline, and return what would have waited for what on devices.

    Args:
        patch: For the stand-ins; it is undone by the caller.
        folder: An empty one.
        num_ranks: Number of stages.
        num_batches: Batches at once.
        num_pieces: Pieces of each batch.
        channels: See there.
        all_in_flight: No result is taken before all batches are sent.
    """
    order = Order(channels)
    _stand_in(patch, order)

    def wait_for_all() -> None:
        if all_in_flight:
            with order.changed:
                assert order.changed.wait_for(lambda: order.num_let_in >= num_batches, _DEADLINE_S)

    last = num_ranks - 1
    pipes = {
        (source, to): NotedPipe(order, wait_for_all if (source, to) == (last, 0) else lambda: None)
        for source in range(num_ranks)
        for to in range(num_ranks)
    }
    placement = Placement(devices=("cpu",) * num_ranks, split="pipeline")
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        _rank_of_thread.set(rank)
        readers: Any = {source: pipes[source, rank] for source in range(num_ranks)}
        writers: Any = {to: pipes[rank, to] for to in range(num_ranks)}
        meeting: Any = folder / "meeting"
        ends = RankEnds(rank, num_ranks, readers, writers, meeting)
        try:
            group = Group(ends, placement)
            steps: Any = SimpleNamespace(network=nn.Identity(), arguments=["input"])
            stage = NotedStage(order, rank, num_ranks)
            pipeline = Pipeline(group, stage, steps, RankPart(rank, 0, ""), SplitReport())
            if rank:
                for _ in range(num_batches * num_pieces):
                    pipeline.serve_next(_DEADLINE_S)
            else:
                _lead(order, group, pipeline, num_batches, num_pieces)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return order


def _lead(
    order: Order, group: Group, pipeline: Pipeline, num_batches: int, num_pieces: int
) -> None:
    choice: Any = SimpleNamespace(choose=lambda rows: num_pieces, note=lambda *args: None)
    pipeline._alone = pipeline._beside = choice
    pipeline._num_checks_left = 0
    let_next_in = pipeline._turnstile.let_next_in

    def let_in() -> None:
        let_next_in()
        order.let_in()

    pipeline._turnstile.let_next_in = let_in  # type: ignore[method-assign]
    lock = ModelLock(lambda since: None)
    group.giving_way = lock.released

    def answer(prepared: Any, own_time: object) -> None:
        order.device("the model's code", order.stream)
        x = torch.arange(8.0)[:, None] + prepared.number
        got = pipeline(x)
        assert isinstance(got, Tensor)
        assert torch.equal(got, x + group.size)
        order.device("copy to the host", order.stream)
        order.host("wait for the copy", order.last_on(order.stream))

    batches = OverlappingBatches(num_batches, lock, answer)
    for number in range(num_batches):
        batches.begin(SimpleNamespace(number=number, is_canary=False))  # type: ignore[arg-type]
    while batches:
        batches.wait(None, _DEADLINE_S)


def without_own_streams(patch: pytest.MonkeyPatch) -> None:
    """Have all threads of a rank use one stream, for transfers too, and never wait for it."""
    patch.setattr(OwnStream, "__init__", lambda own, device=None: setattr(own, "_stream", None))


def _stand_in(patch: pytest.MonkeyPatch, order: Order) -> None:
    class NotedHandOver:
        def __init__(self, stream: StreamKey) -> None:
            self._node = order.last_on(stream)

        def take(self, values: object) -> None:
            order.device("follow", order.stream, self._node)

        def wait(self) -> None:
            order.host("wait for a stream", self._node)

    class NotedSideStream:
        def __init__(self, device: object) -> None:
            self._key = (_rank_of_thread.get(), "side", id(self))

        def in_use(self) -> object:
            return order.on(self._key)

    class NotedLock(FairLock):
        _node: int | None = None

        def acquire(self) -> None:
            super().acquire()
            order.host("acquire a lock", self._node)

        def release(self) -> None:
            self._node = order.host("release a lock")
            super().release()

    class NotedEvent(threading.Event):
        _node: int | None = None

        def set(self) -> None:
            self._node = order.host("leave the pipeline")
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            assert super().wait(_DEADLINE_S)
            order.host("wait for the call before", self._node)
            return True

    seam = inferpool.models.accelerator.order
    patch.setattr(seam, "is_accelerator", lambda device: True)
    patch.setattr(seam, "current_stream", lambda: SimpleNamespace(device=torch.device("cpu")))
    patch.setattr(seam, "mark_here", lambda: NotedHandOver(order.stream))
    patch.setattr(seam, "SideStream", NotedSideStream)
    turnstile = inferpool.models.split.turnstile
    threads = SimpleNamespace(Event=NotedEvent, Condition=threading.Condition)
    patch.setattr(turnstile, "threading", threads)
    patch.setattr(turnstile, "FairLock", NotedLock)
    patch.setattr(inferpool.workers.ranks.lead, "FairLock", NotedLock)
    patch.setattr(inferpool.workers.ranks.group, "dist", NotedDistributed(order))
    patch.setattr(inferpool.workers.ranks.group, "backend_for", lambda devices: "noted")
