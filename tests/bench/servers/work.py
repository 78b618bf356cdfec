"""The work that every peer does, so that only the servers differ.

Runs in the peers' own environments: standard library only, and settings by environment variables.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """One workload, made once in each worker process of a peer."""

    def prepare(self, body: bytes) -> object:
        """Turn one body into an input: decoding, resizing."""

    def compute(self, inputs: Sequence[object]) -> Sequence[dict[str, object]]:
        """Serve a batch."""


class Echo:
    """No model: what is measured is the server. The answer is the number of bytes that arrived."""

    def prepare(self, body: bytes) -> object:
        return len(body)

    def compute(self, inputs: Sequence[object]) -> Sequence[dict[str, object]]:
        return [{"bytes": each} for each in inputs]


_WORK: dict[str, type[Work]] = {"echo": Echo}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a peer is to be run."""

    work: str
    num_workers: int
    max_batch_size: int
    wait_ms: float
    """How long a batch may wait to fill."""

    def make(self) -> Work:
        """The work, in the process that does it."""
        return _WORK[self.work]()

    def environment(self) -> dict[str, str]:
        """The variables from which `setting` reads this in the peer's process."""
        return {
            "BENCH_WORK": self.work,
            "BENCH_WORKERS": str(self.num_workers),
            "BENCH_MAX_BATCH": str(self.max_batch_size),
            "BENCH_WAIT_MS": str(self.wait_ms),
        }


def setting() -> Setting:
    """What this process was told."""
    return Setting(
        work=os.environ["BENCH_WORK"],
        num_workers=int(os.environ["BENCH_WORKERS"]),
        max_batch_size=int(os.environ["BENCH_MAX_BATCH"]),
        wait_ms=float(os.environ["BENCH_WAIT_MS"]),
    )
