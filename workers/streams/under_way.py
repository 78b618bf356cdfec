"""Streams that are under way in one call of a model's generator. Worker processes only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index

from inferpool.models.base import Model
from inferpool.models.errors import BadReturnError
from inferpool.models.item import Features, Item
from inferpool.models.overrides import bad_return
from inferpool.models.streams import StreamSteps
from inferpool.workers.inside.preparing import Prepared
from inferpool.workers.shared.messages import ItemRef

_OWN_REF = ItemRef("bytes", 0, 0, math.inf)


@dataclass(slots=True, eq=False)
class StreamBatch:
    """A batch that came with some streams, which is answered once all of them are over."""

    prepared: Prepared
    streams: "list[OpenStream]" = field(default_factory=list)
    num_left: int = 0
    """Streams that are not over."""
    began: float = 0.0
    """Begin of the first of them; 0.0 before."""

    def __post_init__(self) -> None:
        """Make its streams."""
        self.num_left = len(self.prepared.refs)
        self.streams = [OpenStream(self, row) for row in range(self.num_left)]


@dataclass(slots=True, eq=False)
class OpenStream:
    """One stream: an instance that is to be answered in parts."""

    batch: StreamBatch
    index: int
    group: int = 0
    """Number of its group in its batch: the streams of a group are computed together."""
    position: int = -1
    """Its position in its call; -1 if it is in none."""
    num_parts: int = 0
    is_over: bool = False

    @property
    def ref(self) -> ItemRef:
        """Reference of the instance."""
        return self.batch.prepared.refs[self.index]

    @property
    def item(self) -> Item:
        """The instance."""
        return self.batch.prepared.items[self.index]


class PartsOfOneError(Exception):
    """The model yields the parts of one instance, but its batch has several."""


class StreamCall:
    """One call of a model's generator. Use it in the thread that computes."""

    def __init__(
        self, model: Model, streams: Sequence[OpenStream], batch: Features, *, is_alone: bool
    ) -> None:
        """Begin with some streams, in the order of their rows.

        Args:
            model: The model.
            streams: The streams.
            batch: Their features, collated.
            is_alone: They have failed beside others: no other joins them before the first part.
        """
        self._model = model
        self._steps = StreamSteps(model, batch)
        self.streams = dict(enumerate(streams))
        """Streams that are not over, by their positions."""
        for position, stream in self.streams.items():
            stream.position = position
        self._next_position = len(streams)
        self._untried: set[int] = set()
        self.untold: list[int] = []
        """Positions of streams that are over, which the model does not know yet."""
        self.is_alone = is_alone
        self.has_stepped = False
        self._gives_positions = model.joins

    @property
    def method(self) -> str:
        """Name of the generator."""
        return self._steps.method

    def step(self) -> dict[int, object]:
        """Compute a step; return its parts by position, without those of streams that are over.

        Raises:
            StopIteration: There are no more.
            PartsOfOneError: It is a part of one instance, and there are several.
            BadReturnError: It is no step.
        """
        found = self._steps.next()
        self.has_stepped = True
        self._untried.clear()
        parts = self._by_position(found)
        for position in parts:
            if not 0 <= position < self._next_position:
                known = ", ".join(map(str, self.streams))
                raise self._bad(
                    "parts for positions that it was given", f"one for {position}, not for {known}"
                )
        return {position: part for position, part in parts.items() if position in self.streams}

    @property
    def may_be_joined(self) -> bool:
        """True between two steps of a call whose first part has come, if it had to come alone."""
        return self.has_stepped and not self.is_alone

    def admit(self, streams: Sequence[OpenStream], batch: Features) -> None:
        """Give more streams to the generator, between two steps.

        Raises:
            Exception: The model's `admit` raises.
        """
        positions = range(self._next_position, self._next_position + len(streams))
        self._next_position = positions.stop  # whatever happens: they are not used again
        self._model.admit(batch, list(positions))  # type: ignore[attr-defined]  # a model that joins has it
        for position, stream in zip(positions, streams, strict=True):
            stream.position = position
            self.streams[position] = stream
            self._untried.add(position)

    def is_untried(self, stream: OpenStream) -> bool:
        """Return whether a stream was admitted since the last step."""
        return stream.position in self._untried

    def has(self, stream: OpenStream) -> bool:
        """Return whether a stream is under way here."""
        return self.streams.get(stream.position) is stream

    def remove(self, stream: OpenStream, *, is_known: bool) -> None:
        """Compute a stream no more; `is_known` says that the model has ended it."""
        del self.streams[stream.position]
        self._untried.discard(stream.position)
        if not is_known:
            self.untold.append(stream.position)

    def tell_drops(self) -> None:
        """Tell the model of streams that are over, between two steps.

        Raises:
            Exception: The model's `drop` raises.
        """
        drop = getattr(self._model, "drop", None)
        while self.untold:
            position = self.untold.pop(0)
            if callable(drop):
                drop(position)

    def close(self) -> None:
        """End the generator.

        Raises:
            Exception: Its `finally` raises.
        """
        self._steps.close()

    def _by_position(self, found: object) -> dict[int, object]:
        model = self._model
        if model._streams_alone and self._next_position == 1:
            return {0: found}
        if isinstance(found, Mapping) and (by_position := _positions_in(found)) is not None:
            self._gives_positions = self._gives_positions or bool(by_position)
            return by_position
        if self._gives_positions:
            raise self._bad("{position: part} at each step", type(found).__name__)
        if self._next_position > 1:
            raise PartsOfOneError
        model._streams_alone = True
        return {0: found}

    def _bad(self, must: str, found: str) -> BadReturnError:
        error = bad_return(self._model, self.method, must, found)
        return BadReturnError(str(error).replace(" must return ", " must yield ", 1))


def _positions_in(found: Mapping[object, object]) -> dict[int, object] | None:
    """Return a step with whole numbers as positions; None if they are something else."""
    parts: dict[int, object] = {}
    for key, part in found.items():
        if isinstance(key, str | bool):
            return None
        try:
            parts[index(key)] = part  # type: ignore[arg-type]  # what is no number raises
        except TypeError:
            return None
    return parts


def merged(streams: Sequence[OpenStream]) -> Prepared:
    """Return streams of any batches as one that is preprocessed, to be grouped and collated."""
    rows = [(stream.batch.prepared, stream.index) for stream in streams]
    return Prepared(
        id=0,
        refs=[stream.ref for stream in streams],
        items=[stream.item for stream in streams],
        features=[prepared.features[row] for prepared, row in rows],
        buckets=[prepared.buckets[row] for prepared, row in rows],
        outcomes=[None] * len(rows),
    )


def opened(items: Sequence[Item]) -> list[OpenStream]:
    """Return streams of instances that no client sent."""
    num = len(items)
    prepared = Prepared(
        id=0,
        refs=[_OWN_REF] * num,
        items=items,
        features=[None] * num,
        buckets=[None] * num,
        outcomes=[None] * num,
    )
    return StreamBatch(prepared).streams
