"""A source of inputs that a test gives."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence

from inferpool.service.batch.inputs import BatchInput, InputKind, failed_input


class Listed:
    """Inputs from a list. One of them may end the process that reads it, if it is a reader."""

    def __init__(
        self,
        kind: InputKind,
        contents: Sequence[bytes | None],
        deadly: int | None = None,
        prefix: str = "",
    ) -> None:
        self._kind, self._contents, self._deadly, self._prefix = kind, contents, deadly, prefix

    def __len__(self) -> int:
        return len(self._contents)

    def name(self, index: int) -> str:
        return f"{self._prefix}{index}"

    def stamps(self) -> Iterator[str]:
        return iter(())

    def read(self, index: int) -> BatchInput:
        if index == self._deadly and multiprocessing.parent_process() is not None:
            os._exit(1)
        data = self._contents[index]
        if data is None:
            return failed_input(index, self.name(index), "no")
        return BatchInput(index=index, name=self.name(index), kind=self._kind, data=data)
