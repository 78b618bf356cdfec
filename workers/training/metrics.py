"""Writes what happens in a run as lines of JSON. Rank 0 does it."""

import os
import time
from pathlib import Path

import msgspec

from inferpool.models.training.events import AnyEvent, read_events


class MetricsFile:
    """The lines of a run, which goes on after a step. What came after that step is left out.

    Args:
        path: The file.
        after_step: Step of the checkpoint that the run goes on from; 0 for a new run.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept: list[bytes] = []
        if after_step and path.is_file():
            with path.open("rb") as lines:
                events = [event for event in read_events(lines) if event.step <= after_step]
            kept = [msgspec.json.encode(event) + b"\n" for event in events]
        new = path.with_suffix(".new")
        new.write_bytes(b"".join(kept))
        os.replace(new, path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: AnyEvent) -> None:
        """Add a line."""
        self._file.write(msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def now() -> float:
    """Return the moment for an event, in seconds since 1970."""
    return round(time.time(), 3)
