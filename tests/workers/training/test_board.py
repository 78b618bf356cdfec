"""Event files for TensorBoard."""

import os
import struct
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from inferpool.models.training.events import Stepped, Validated
from inferpool.workers.training.board import open_board


def stepped(step, at=5.0) -> Stepped:
    return Stepped(step=step, at=at, epoch=1, loss=0.5, learning_rate=0.25, images_per_s=1000.0)


def validated(step) -> Validated:
    return Validated(
        step=step, at=6.0, epoch=1, train_loss=0.75, loss=0.5, accuracy=0.875, is_best=True,
        seconds=2.0,
    )  # fmt: skip


def read(path) -> list[Event]:
    """Read the records of an event file: length, its checksum, data, their checksum."""
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert len(data) >= 16 + length
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def figures(event) -> dict[str, float]:
    return {value.tag: value.simple_value for value in event.summary.value}


def test_figures_of_events_can_be_read_by_tensorboard(tmp_path):
    board = open_board(tmp_path / "new" / "tensorboard", purge_step=0)
    assert board is not None
    board.add(stepped(3))
    board.add(validated(4))
    board.close()
    (path,) = (tmp_path / "new" / "tensorboard").iterdir()
    version, start, first, second = read(path)
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 0)
    assert (first.step, first.wall_time) == (3, 5.0)
    assert figures(first) == {"loss/training": 0.5, "learning_rate": 0.25, "images_per_s": 1000.0}
    assert (second.step, second.wall_time) == (4, 6.0)
    assert figures(second) == {
        "loss/training_epoch": 0.75, "loss/held_out": 0.5, "accuracy/held_out": 0.875,
    }  # fmt: skip


def test_run_that_goes_on_has_another_file_which_says_from_where(tmp_path, monkeypatch):
    for pid, step in ((1, 0), (2, 46)):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        board = open_board(tmp_path, purge_step=step)
        assert board is not None
        board.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.suffix)
    assert [read(path)[1].step for path in (first, second)] == [0, 46]


def test_figures_are_on_the_disk_while_the_run_goes_on(tmp_path):
    board = open_board(tmp_path, purge_step=0)
    assert board is not None
    (path,) = tmp_path.iterdir()
    for at in (1000.0, 1001.0, 1010.0):
        board.add(stepped(1, at))
    assert len(read(path)) == 5
    board.close()


def test_there_is_no_board_without_tensorboardx(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert open_board(tmp_path, purge_step=0) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_told_and_nothing_hangs(tmp_path):
    board = open_board(tmp_path, purge_step=0)
    assert board is not None
    (path,) = tmp_path.iterdir()
    path.unlink()
    full = os.open("/dev/full", os.O_WRONLY)
    writer = board._writer._writer
    os.dup2(full, writer.fileno())
    os.close(full)
    with pytest.raises(OSError, match="No space"):
        board.add(validated(4))
    with pytest.raises(OSError, match="No space"):
        board.close()
