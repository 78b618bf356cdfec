"""The progress of a run, and its report at the end, on stderr."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inferpool.models.texts import on_one_line
from inferpool.service.batch.inputs import BatchAnswer

_MAX_LISTED = 1000
_MAX_CLASSES = 20
_MAX_CONFUSIONS = 10
_TOP = 5
_LINE_S = 10.0
_STARTS = "the model starts"
_SHOW_S = 0.1
"""Pause between changes of the bar: the rate costs as much as counting a hundred answers."""

_Answered = tuple[str, str, str]
"""A label, and the model's label and index."""


class BatchReport:
    """Counts answers, and shows the progress and the outcome."""

    def __init__(
        self, stream: TextIO, num_inputs: int, *, is_quiet: bool = False, line_s: float = _LINE_S
    ) -> None:
        """Show nothing yet.

        Args:
            stream: Where to write: a bar if it is a terminal, else lines.
            num_inputs: Number of all inputs.
            is_quiet: Show no progress.
            line_s: Pause between lines if nothing else is written.
        """
        self.num_failed = 0
        self.num_done = 0
        self._num_earlier = 0
        self._failures: list[BatchAnswer] = []
        self._answered: Counter[_Answered] = Counter()
        self._num_top5: Counter[int] = Counter()
        """Labels among the best answers, by name (0) and by index (1)."""
        self._has_top5 = True
        self._console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._num_inputs = num_inputs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=is_quiet or not stream.isatty(),
        )
        self._has_lines = not is_quiet and not stream.isatty()
        self._line_s = line_s
        self._doing = f"inputs: {num_inputs:,}; importing torch"
        self._began = time.monotonic()
        self._task = self._progress.add_task(self._doing, total=None, rate="")
        self._next_show = 0.0
        self._is_over = threading.Event()
        # The main thread cannot write while it imports torch.
        self._teller = threading.Thread(target=self._keep_saying, name="batch-report", daemon=True)

    def start(self) -> None:
        """Show the bar, or write a line now and then until `stop`."""
        self._progress.start()
        if self._has_lines:
            self._say(self._doing)
            self._teller.start()

    def wait_for_model(self) -> None:
        """Show that the model starts."""
        self._doing = _STARTS
        self._progress.update(self._task, description=self._doing)
        self._say_on_pipe(self._doing)

    def begin(self) -> None:
        """Show that answers may come, and measure the rate from now on."""
        if self._doing == _STARTS:
            self._say_on_pipe(f"the model is ready after {time.monotonic() - self._began:.1f} s")
        self._doing = ""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            "", total=self._num_inputs, completed=self.num_done, rate=""
        )

    def stop(self) -> None:
        """Remove the bar, or write no more lines."""
        self._progress.stop()
        self._is_over.set()
        if self._teller.is_alive():
            self._teller.join()

    def add(self, answer: BatchAnswer, *, is_earlier: bool = False) -> None:
        """Count an answer, also one of an earlier run."""
        self.num_done += 1
        self._num_earlier += is_earlier
        if answer.code:
            self.num_failed += 1
            if len(self._failures) < _MAX_LISTED:
                self._failures.append(answer)
        elif answer.label is not None and (best := _labels_of(answer.prediction)):
            self._answered[answer.label, *best[0]] += 1
            for kind in (0, 1):
                self._num_top5[kind] += any(answer.label == each[kind] for each in best[:_TOP])
            self._has_top5 = self._has_top5 and len(best) >= _TOP
        now = time.monotonic()
        if not is_earlier and (now > self._next_show or self.num_done == self._num_inputs):
            self._next_show = now + _SHOW_S
            speed = self._progress.tasks[0].speed
            rate = f"{speed:,.1f}/s" if speed else ""
            self._progress.update(self._task, completed=self.num_done, rate=rate)

    def tell(self, elapsed_s: float) -> None:
        """Print the failures, the accuracy and the rate."""
        for each in self._failures:
            self._say(f"{each.name}: {each.message}")
        if self.num_failed > len(self._failures):
            self._say(f"and {self.num_failed - len(self._failures):,} more, which the output names")
        if self._answered:
            self._tell_accuracy()
        here = self.num_done - self._num_earlier
        rate = f", {here / elapsed_s:,.1f}/s" if here and elapsed_s else ""
        earlier = f" ({self._num_earlier:,} by an earlier run)" if self._num_earlier else ""
        self._say(
            f"{self.num_done:,} of {self._num_inputs:,} done{earlier}, "
            f"{self.num_failed:,} failed; {elapsed_s:,.1f} s{rate}"
        )

    def _tell_accuracy(self) -> None:
        """Print the accuracy by names or by indices: the higher of the two."""
        num_all = self._answered.total()
        kind = max((0, 1), key=lambda kind: (self._num_right(kind), self._num_top5[kind]))
        top5 = f", top-5 {self._num_top5[kind] / num_all:.2%}" if self._has_top5 else ""
        self._say(f"accuracy {self._num_right(kind) / num_all:.2%}{top5} of {num_all:,} labelled")
        confusions: Counter[tuple[str, str]] = Counter()
        for (label, *best), num in self._answered.items():
            confusions[label, best[kind]] += num
        names = sorted({label for label, _ in confusions})
        if not self._num_top5[kind]:
            self._say(f"no answer has a label such as {names[0]!r}, by name or by index")
        elif len(names) > _MAX_CLASSES:
            wrong = Counter({pair: num for pair, num in confusions.items() if pair[0] != pair[1]})
            for (label, found), num in wrong.most_common(_MAX_CONFUSIONS):
                self._say(f"{num:,} x {label} taken for {found}")
        else:
            self._tell_confusions(confusions, names)

    def _num_right(self, kind: int) -> int:
        return sum(num for (label, *best), num in self._answered.items() if label == best[kind])

    def _tell_confusions(self, confusions: Counter[tuple[str, str]], names: Sequence[str]) -> None:
        """Print a row for each label, and a column for each answer, by the row's number."""
        numbers = [str(number) for number in range(1, len(names) + 1)]
        rows = [["", "label", *numbers, "others"]]
        for number, label in zip(numbers, names, strict=True):
            row = [confusions[label, found] for found in names]
            others = sum(num for (each, _), num in confusions.items() if each == label) - sum(row)
            rows.append([number, on_one_line(label), *(str(num or ".") for num in (*row, others))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, label, *cells in rows:  # by hand: a table of rich drops cells without room
            shown = [f"{cell:>{width}}" for cell, width in zip(cells, widths[2:], strict=True)]
            self._say("  ".join([f"{number:>{widths[0]}}", f"{label:{widths[1]}}", *shown]))

    def _keep_saying(self) -> None:
        while not self._is_over.wait(self._line_s):
            spent = f" ({time.monotonic() - self._began:.0f} s)"
            if doing := self._doing:
                self._say(f"{doing}{spent}")
            else:
                done = f"{self.num_done:,} of {self._num_inputs:,} done"
                self._say(f"{done}, {self.num_failed:,} failed{spent}")

    def _say_on_pipe(self, text: str) -> None:
        if self._has_lines:
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(on_one_line(text))


def _labels_of(prediction: object) -> list[tuple[str, str]]:
    """Return the labels of a classifier's answer, best first, each with its index."""
    if not isinstance(prediction, list):
        return []
    return [
        (each["label"], str(each.get("index", "")))
        for each in prediction
        if isinstance(each, dict) and isinstance(each.get("label"), str)
    ]
