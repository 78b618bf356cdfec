"""The progress of a run, and its report at the end, on stderr."""

from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from inferpool.service.batch.inputs import BatchAnswer

_MAX_LISTED = 1000
_MAX_CLASSES = 20
_MAX_CONFUSIONS = 10
_TOP = 5


class BatchReport:
    """Counts answers, shows how far the run is, and tells the outcome."""

    def __init__(self, stream: TextIO, num_inputs: int, *, is_quiet: bool = False) -> None:
        self.num_failed = 0
        self._num_done = 0
        self._num_earlier = 0
        self._failures: list[BatchAnswer] = []
        self._confusions: Counter[tuple[str, str]] = Counter()
        self._num_labelled = 0
        self._num_top5 = 0
        self._has_top5 = True
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._num_inputs = num_inputs
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=is_quiet or not stream.isatty(),
        )
        self._task = self._progress.add_task("", total=num_inputs, rate="")

    def start(self) -> None:
        """Show the bar, on a terminal."""
        self._progress.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def add(self, answer: BatchAnswer, *, is_earlier: bool = False) -> None:
        """Count an answer, also one of an earlier run."""
        self._num_done += 1
        self._num_earlier += is_earlier
        if answer.code:
            self.num_failed += 1
            if len(self._failures) < _MAX_LISTED:
                self._failures.append(answer)
        elif answer.label is not None and (best := _labels_of(answer.prediction)):
            self._compare(answer.label, best)
        speed = self._progress.tasks[0].speed
        rate = f"{speed:,.1f}/s" if speed else ""
        self._progress.update(self._task, completed=self._num_done, rate=rate)

    def tell(self, elapsed_s: float) -> None:
        """Print the failures, how right the answers are, and the rate."""
        say = self._console.print
        for each in self._failures:
            say(f"{each.name}: {each.message}", markup=False)
        if self.num_failed > len(self._failures):
            say(f"and {self.num_failed - len(self._failures):,} more, which the output names")
        if self._num_labelled:
            self._tell_accuracy()
        here = self._num_done - self._num_earlier
        rate = f", {here / elapsed_s:,.1f}/s" if here and elapsed_s else ""
        earlier = f" ({self._num_earlier:,} by an earlier run)" if self._num_earlier else ""
        say(
            f"{self._num_done:,} of {self._num_inputs:,} done{earlier}, "
            f"{self.num_failed:,} failed; {elapsed_s:,.1f} s{rate}"
        )

    def _compare(self, label: str, best: Sequence[tuple[str, str]]) -> None:
        """Compare a label with the best answers, each a label and an index."""
        by_index = label not in best[0] and any(label == index for _, index in best)
        place = 1 if by_index or label == best[0][1] else 0
        self._num_labelled += 1
        self._confusions[label, best[0][place]] += 1
        self._num_top5 += any(label in each for each in best[:_TOP])
        self._has_top5 = self._has_top5 and len(best) >= _TOP

    def _tell_accuracy(self) -> None:
        right = sum(num for (label, found), num in self._confusions.items() if label == found)
        top5 = f", top-5 {self._num_top5 / self._num_labelled:.2%}" if self._has_top5 else ""
        self._console.print(
            f"accuracy {right / self._num_labelled:.2%}{top5} of {self._num_labelled:,} labelled"
        )
        names = sorted({label for label, _ in self._confusions})
        if len(names) > _MAX_CLASSES:
            wrong = Counter({p: num for p, num in self._confusions.items() if p[0] != p[1]})
            for (label, found), num in wrong.most_common(_MAX_CONFUSIONS):
                self._console.print(f"{num:,} x {label} taken for {found}", markup=False)
            return
        table = Table("label \\ answer", *names, "others")
        for label in names:
            row = [self._confusions[label, found] for found in names]
            num_all = sum(num for (each, _), num in self._confusions.items() if each == label)
            table.add_row(label, *map(str, row), str(num_all - sum(row)))
        self._console.print(table)


def _labels_of(prediction: object) -> list[tuple[str, str]]:
    """Return the labels of a classifier's answer, best first, each with its index."""
    if not isinstance(prediction, list):
        return []
    return [
        (each["label"], str(each.get("index", "")))
        for each in prediction
        if isinstance(each, dict) and isinstance(each.get("label"), str)
    ]
