"""Writes what happens in a run as lines of JSON. Rank 0 does it."""

import contextlib
import time
from pathlib import Path

import msgspec

from inferpool.models.files.writing import replacing
from inferpool.models.training.events import AnyEvent, Noted, Stepped, Validated, read_events
from inferpool.workers.training.board import Board


class MetricsFile:
    """The lines of a run, which goes on after a step. What came after that step is left out.

    Lasting notes are kept, with that step.

    A full disk loses lines, and never ends the training.

    Args:
        path: The file.
        after_step: Step of the checkpoint that the run goes on from; 0 for a new run.
        board: Gets the curves too, if there is one.
    """

    def __init__(self, path: Path, *, after_step: int, board: Board | None = None) -> None:
        kept: list[AnyEvent] = []
        if path.is_file():
            with path.open("rb") as lines:
                for event in read_events(lines):
                    if isinstance(event, Noted) and event.is_lasting:
                        step = min(event.step, after_step)
                        kept.append(msgspec.structs.replace(event, step=step))
                    elif event.step <= after_step and after_step:
                        kept.append(event)
        with replacing(path) as draft:
            draft.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in kept))
        self._file = path.open("ab", buffering=0)
        self._board = board

    def write(self, event: AnyEvent) -> None:
        """Add a line."""
        with contextlib.suppress(OSError):
            self._file.write(msgspec.json.encode(event) + b"\n")
        if self._board is not None and isinstance(event, Stepped | Validated):
            with contextlib.suppress(OSError):
                self._board.add(event)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()


def now() -> float:
    """Return the moment for an event, in seconds since 1970."""
    return round(time.time(), 3)
