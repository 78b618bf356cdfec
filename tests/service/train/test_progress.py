"""The progress of a training run, as the command shows it."""

import io
import os
import re
import threading
import time

import msgspec
import pytest

from inferpool.models.training.events import (
    AnyEvent,
    Noted,
    Saved,
    Skipped,
    Started,
    Stepped,
    Validated,
)
from inferpool.service.train.progress import MetricsTail, TrainProgress


class WrittenMetrics:
    """Writes events as rank 0 does."""

    def __init__(self, path):
        self.path = path
        self.moment = 1e9

    def append(self, *events: AnyEvent) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(map(line_of, events)))

    def started(self, step=0) -> Started:
        return Started(
            step=step, at=self._at(), num_steps=840, num_epochs=28, num_ranks=2,
            devices=["cpu", "cpu"], batch_size=64, num_training=1437, num_validation=360,
        )  # fmt: skip

    def stepped(self, step, loss=0.5) -> Stepped:
        return Stepped(
            step=step, at=self._at(), epoch=1 + step // 30, loss=loss, learning_rate=3e-4,
            images_per_s=1234.5,
        )  # fmt: skip

    def validated(self, epoch, accuracy, is_best=True) -> Validated:
        return Validated(
            step=30 * epoch, at=self._at(), epoch=epoch, train_loss=0.9, loss=0.41,
            accuracy=accuracy, is_best=is_best, seconds=2.0,
        )  # fmt: skip

    def skipped(self, name, reason="it is empty") -> Skipped:
        return Skipped(step=1, at=self._at(), path=name, reason=reason)

    def noted(self, text) -> Noted:
        return Noted(step=1, at=self._at(), text=text)

    def _at(self) -> float:
        self.moment += 1
        return self.moment


class Told(io.StringIO):
    """What is shown. One may wait for it."""

    def wait_for(self, text, timeout_s=60.0):
        until = time.monotonic() + timeout_s
        while text not in self.getvalue():
            assert time.monotonic() < until, f"no {text!r} in {self.getvalue()!r}"
            time.sleep(0.01)


def line_of(event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


@pytest.fixture
def metrics(tmp_path):
    return WrittenMetrics(tmp_path / "metrics.jsonl")


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def progress(told, metrics):
    progress = TrainProgress(told, metrics.path)
    progress.start()
    yield progress
    progress.stop()


def test_each_epoch_has_one_plain_line_where_there_is_no_terminal(progress, told, metrics):
    metrics.append(metrics.started(), metrics.stepped(10), metrics.stepped(30))
    metrics.append(metrics.validated(1, 0.975), Saved(step=30, at=1e9, num_bytes=1, seconds=1.0))
    told.wait_for("epoch 1/28")
    metrics.append(metrics.validated(2, 0.95, is_best=False))
    progress.stop()
    assert told.getvalue().splitlines() == [
        "epoch 1/28: loss 0.41, held-out accuracy 97.5 % (best)",
        "epoch 2/28: loss 0.41, held-out accuracy 95.0 %",
    ]


def test_line_that_is_half_written_is_told_once_it_is_whole(progress, told, metrics):
    line = line_of(metrics.noted("the batch was halved"))
    metrics.path.write_bytes(line_of(metrics.noted("first")) + line[:20])
    told.wait_for("first")
    with metrics.path.open("ab") as file:
        file.write(line[20:])
    told.wait_for("the batch was halved")


def test_ranks_that_start_again_are_told_and_nothing_is_told_twice(progress, told, metrics):
    kept = [metrics.started(), metrics.validated(1, 0.5)]
    metrics.append(*kept, metrics.validated(2, 0.75), metrics.noted("seen"))
    told.wait_for("seen")
    metrics.path.write_bytes(b"".join(map(line_of, kept)))
    metrics.append(metrics.started(step=45), metrics.validated(2, 0.7))
    told.wait_for("70.0 %")
    assert told.getvalue().splitlines() == [
        "epoch 1/28: loss 0.41, held-out accuracy 50.0 % (best)",
        "epoch 2/28: loss 0.41, held-out accuracy 75.0 % (best)",
        "seen",
        "starts again from step 45 of 840",
        "epoch 2/28: loss 0.41, held-out accuracy 70.0 % (best)",
    ]


def test_ranks_that_start_again_without_a_checkpoint_are_told(progress, told, metrics):
    metrics.append(metrics.started(), metrics.started())
    told.wait_for("starts again from step 0 of 840")


def test_run_that_goes_on_tells_only_what_is_new(told, metrics):
    metrics.append(metrics.started(), metrics.validated(1, 0.9), metrics.noted("old"))
    progress = TrainProgress(told, metrics.path)
    progress.start()
    metrics.append(metrics.started(step=30), metrics.validated(2, 0.95))
    progress.stop()
    assert told.getvalue().splitlines() == [
        "starts again from step 30 of 840",
        "epoch 2/28: loss 0.41, held-out accuracy 95.0 % (best)",
    ]


def test_first_skipped_images_are_named_and_the_others_counted(progress, told, metrics):
    images = [metrics.skipped(f"{number}.png") for number in range(8)]
    metrics.append(*images, *images)
    progress.stop()
    lines = told.getvalue().splitlines()
    assert lines[0] == "0.png is skipped: it is empty"
    assert lines[5:] == ["3 more images are skipped"]


def test_events_of_the_same_moment_are_all_told(progress, told, metrics):
    at = 1e9
    metrics.append(*(Noted(step=0, at=at, text=f"note {number}") for number in range(3)))
    told.wait_for("note 2")
    metrics.append(Noted(step=0, at=at, text="note 3"))
    told.wait_for("note 3")
    assert len(told.getvalue().splitlines()) == 4


def test_names_of_files_cannot_give_orders_to_the_terminal(progress, told, metrics):
    metrics.append(metrics.skipped("a\x1b[31m\n[red]\u202e.png", "bad\rthing"))
    progress.stop()
    assert told.getvalue() == "a\\x1b[31m\\n[red]\\u202e.png is skipped: bad\\rthing\n"


def test_nothing_is_told_if_it_is_to_be_quiet(told, metrics):
    progress = TrainProgress(told, metrics.path, is_quiet=True)
    progress.start()
    metrics.append(metrics.started(), metrics.validated(1, 0.9))
    progress.stop()
    assert told.getvalue() == ""


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (80, r"loss 0\.25, 1,234/s, best 97\.5 % "),
        (120, r"loss 0\.25, rate 3\.0e-04, 1,234 images/s, best 97\.5 % "),
    ],
)
def test_terminal_shows_a_bar_with_figures_below_the_lines(metrics, monkeypatch, columns, figures):
    monkeypatch.setenv("COLUMNS", str(columns))
    ours, theirs = os.openpty()
    written = bytearray()
    reader = threading.Thread(target=_read_all, args=(ours, written))
    reader.start()
    with os.fdopen(theirs, "w") as stream:
        progress = TrainProgress(stream, metrics.path)
        progress.start()
        metrics.append(metrics.started(), metrics.validated(1, 0.975), metrics.stepped(60, 0.25))
        progress.stop()
    reader.join(60)
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    assert "epoch 1/28: loss 0.41, held-out accuracy 97.5 % (best)\r\n" in text
    assert re.search(r"epoch 3/28 [━╸╺ ]+ 60/840 +" + figures, text), text


def test_run_goes_on_if_nobody_reads_what_it_tells(metrics):
    ours, theirs = os.pipe()
    os.close(ours)
    stream = os.fdopen(theirs, "w")
    progress = TrainProgress(stream, metrics.path)
    progress.start()
    metrics.append(metrics.started(), metrics.validated(1, 0.9), metrics.validated(2, 0.9))
    progress.stop()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_tail_waits_for_a_file_and_reads_another_one_from_its_start(metrics):
    tail = MetricsTail(metrics.path)
    assert tail.read() == []
    events = [metrics.started(), metrics.stepped(1), metrics.stepped(2)]
    metrics.append(*events)
    assert tail.read() == events
    assert tail.read() == []
    metrics.path.unlink()
    assert tail.read() == []
    metrics.append(events[0], metrics.stepped(7), metrics.stepped(8), metrics.stepped(9))
    assert [event.step for event in tail.read()] == [0, 7, 8, 9]
    assert tail.is_new


def _read_all(fd, written):
    while True:
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # the other end is closed
            return
        written += data
