"""Writes the curves of a training run for TensorBoard. Rank 0 alone.

It needs tensorboardX, of the extra `train`. Its `SummaryWriter` is not used: it hands events to a
thread through a queue that blocks for ever once a full disk has ended the thread.
"""

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.models.training.events import Stepped, Validated

if TYPE_CHECKING:
    from tensorboardX import RecordWriter

_FLUSH_S = 10.0
"""Seconds between two times that the file is brought to the disk."""


class Board:
    """An event file of TensorBoard; see `open_board`."""

    def __init__(self, writer: "RecordWriter") -> None:
        self._writer = writer
        self._flushed_at = 0.0

    def add(self, event: Stepped | Validated) -> None:
        """Add the figures of an event.

        Raises:
            OSError: They cannot be written, for instance since the disk is full.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=y) for tag, y in _figures(event).items()]
        record = Event(wall_time=event.at, step=event.step, summary=Summary(value=values))
        self._writer.write(record.SerializeToString())
        if event.at - self._flushed_at >= _FLUSH_S or isinstance(event, Validated):
            self._writer.flush()
            self._flushed_at = event.at

    def close(self) -> None:
        """Write what is left.

        Raises:
            OSError: It cannot be written.
        """
        try:
            self._writer.flush()
        finally:
            self._writer.close()


def open_board(folder: Path, *, purge_step: int) -> Board | None:
    """Begin an event file beside those of earlier starts of the run.

    Args:
        folder: The folder of event files; it is created if need be.
        purge_step: TensorBoard leaves out this step and later ones in the earlier files.

    Returns:
        None if tensorboardX is not installed.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
    except ImportError:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    # The process tells starts within one second apart.
    name = f"events.out.tfevents.{int(now):010}.{socket.gethostname()}.{os.getpid()}"
    writer = RecordWriter(str(folder.absolute() / name))
    start = SessionLog(status=SessionLog.START)
    for record in (
        Event(wall_time=now, file_version="brain.Event:2"),  # what each file begins with
        Event(wall_time=now, step=purge_step, session_log=start),
    ):
        writer.write(record.SerializeToString())
    writer.flush()
    return Board(writer)


def _figures(event: Stepped | Validated) -> dict[str, float]:
    """Return figures by TensorBoard's tags, which stand together if they begin alike."""
    if isinstance(event, Stepped):
        return {
            "loss/training": event.loss,
            "learning_rate": event.learning_rate,
            "images_per_s": event.images_per_s,
        }
    return {
        "loss/training_epoch": event.train_loss,
        "loss/held_out": event.loss,
        "accuracy/held_out": event.accuracy,
    }
