"""TorchServe's helpers for handlers that work in pieces. Worker processes only.

Handlers import them as `micro_batching` and `hf_batch_streamer` of `ts.handler_utils`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from inferpool.models.torchserve.context import HandlerContext

_STEPS = ("preprocess", "inference", "postprocess")


class InSteps(Protocol):
    """A handler that works in three steps, as `BaseHandler` does."""

    context: Any
    preprocess: Callable[[Any], Any]
    inference: Callable[[Any], Any]
    postprocess: Callable[[Any], Any]


class MicroBatching:
    """Has a handler compute a batch in pieces, some of which are in different steps at once."""

    def __init__(
        self,
        parent_handler: InSteps,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        """Store a handler, and the number of threads of each of its steps."""
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_local_data = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._parallelism = dict.fromkeys(_STEPS, 1)
        self.parallelism = dict(parallelism or {})

    @property
    def parallelism(self) -> dict[str, int]:
        """The number of threads of each step."""
        return {**self._parallelism}

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        if unknown := [name for name in parallelism if name not in _STEPS]:
            raise ValueError(f"there is no step {unknown[0]!r}: they are {', '.join(_STEPS)}")
        self._parallelism |= parallelism
        self.shutdown()
        self._turns = {name: threading.Semaphore(num) for name, num in self._parallelism.items()}
        self._pool = ThreadPoolExecutor(sum(self._parallelism.values()), "micro batch")

    def shutdown(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def handle(self, data: Sequence[object]) -> list[object]:
        """Compute a batch in pieces; return its answers in order."""
        assert self._pool is not None, "it is shut down"
        size = self.micro_batch_size
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        found = self._pool.map(self._computed, range(len(pieces)), pieces)
        return [answer for answers in found for answer in answers]

    def get_micro_batch_idx(self) -> int | None:
        """Return the number of the piece that this thread computes."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def __call__(self, data: Sequence[object], context: HandlerContext) -> list[object]:
        """Compute a batch in the place of the handler's own `handle`."""
        self.handler.context = context
        return self.handle(data)

    def _computed(self, number: int, piece: Any) -> Sequence[object]:
        self.thread_local_data.micro_batch_idx = number
        found = piece
        for name in _STEPS:
            with self._turns[name]:
                found = getattr(self.handler, name)(found)
        answers: Sequence[object] = found
        return answers


class TextIteratorStreamerBatch:
    """A streamer for `generate` of transformers that yields the texts of a batch, step by step."""

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        """Make a streamer of transformers for each text."""
        from transformers import TextIteratorStreamer

        self.batch_size = batch_size
        self.streamers: list[Any] = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs)
            for _ in range(batch_size)
        ]
        self.streamer_iterators = [iter(each) for each in self.streamers]

    def put(self, value: Tensor) -> None:
        """Add the next tokens, with the batch dimension first.

        Raises:
            ValueError: They are for a batch of another size.
        """
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"tokens of {self.batch_size} texts are expected, not of shape {[*value.shape]}"
            )
        for row, streamer in enumerate(self.streamers):
            streamer.put(value[row : row + 1])

    def end(self) -> None:
        """End all texts."""
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        """Return itself."""
        return self

    def __next__(self) -> list[dict[str, str]]:
        """Return the next text of each; all end with the first that ends."""
        return [{"text": next(each)} for each in self.streamer_iterators]
