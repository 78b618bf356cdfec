"""The loop of a run, with a target that answers as it is told."""

import asyncio
import io

import pytest

from inferpool.service.batch.inputs import RunLostError, SourceUnusableError
from inferpool.service.batch.outputs import Journal
from inferpool.service.batch.report import BatchReport
from inferpool.service.batch.run import BatchRun, TooManyErrorsError
from tests.service.batch.listed import Listed


def numbers(num, prefix=""):
    """Return a source of numbers."""
    return Listed("json", [b"%d" % index for index in range(num)], prefix=prefix)


class Acting:
    """A target that answers each number in its own way."""

    room = 4
    max_pixels: int | None = None

    def __init__(self, act):
        self._act = act
        self.num_at_once = self.most_at_once = 0

    async def predict(self, given):
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0)
            return await self._act(given)
        finally:
            self.num_at_once -= 1


async def echo(given):
    """Answer with the number, the even ones later."""
    for _ in range(given.input.index % 2 * 5):
        await asyncio.sleep(0)
    return given.answered(given.input.index)


async def fail(given):
    """Refuse every third number."""
    if given.input.index % 3 == 0:
        return given.refused("no", "no")
    return given.answered(given.input.index)


def run(path, num, act, **options):
    """Run it to its end; return the answers in the output."""
    with Journal(
        str(path), "jsonl", about={}, resumes=options.pop("resumes", False), overwrites=False
    ) as output:
        report = BatchReport(io.StringIO(), num, is_quiet=True)
        one = BatchRun(numbers(num), output, report, **options)
        missing = one.missing()
        one.check_errors()
        target = Acting(act)
        try:
            asyncio.run(one.run(target, missing, num_readers=0, chunk=3))
        finally:
            assert target.most_at_once <= 4
        output.finish()
    return answers(path)


def answers(path):
    """Return the answers in an output, as they lie there."""
    with Journal(str(path), "jsonl", about={}, resumes=True, overwrites=False) as file:
        return list(file.earlier())


def test_answers_come_in_the_order_of_the_inputs_or_as_they_are_ready(tmp_path):
    kept = run(tmp_path / "a", 50, echo)
    assert [each.prediction for each in kept] == list(range(50))
    free = run(tmp_path / "b", 50, echo, keeps_order=False)
    assert [each.prediction for each in free] != list(range(50))
    assert sorted(each.prediction for each in free) == list(range(50))


def test_a_lost_target_ends_the_run_and_a_later_one_goes_on(tmp_path):
    async def lose(given):
        if given.input.index == 20:
            raise RunLostError("gone")
        return given.answered(given.input.index)

    with pytest.raises(RunLostError, match="gone"):
        run(tmp_path / "a", 50, lose)
    before = answers(tmp_path / "a")
    assert 10 < len(before) <= 20
    assert [each.prediction for each in run(tmp_path / "a", 50, echo, resumes=True)] == (
        list(range(50))
    )


def test_failures_of_earlier_runs_count_too(tmp_path):
    with pytest.raises(TooManyErrorsError, match="3 inputs failed, more than --max-errors 2"):
        run(tmp_path / "a", 50, fail, max_errors=2)
    with pytest.raises(TooManyErrorsError):
        run(tmp_path / "a", 50, fail, max_errors=2, resumes=True)
    assert len(answers(tmp_path / "a")) < 10, "nothing more was asked"
    assert len(run(tmp_path / "a", 50, fail, max_errors=17, resumes=True)) == 50


def test_answers_for_other_inputs_are_not_mixed_in(tmp_path):
    run(tmp_path / "a", 5, echo)
    for source, why in (
        (numbers(5, "other"), "0 as input 0, which is other0 now"),
        (numbers(4), "an answer too many, for input 4"),
        (numbers(6), "5 answers, and the run that wrote it is over"),
    ):
        report = BatchReport(io.StringIO(), len(source), is_quiet=True)
        with (
            Journal(
                str(tmp_path / "a"), "jsonl", about={}, resumes=True, overwrites=False
            ) as output,
            pytest.raises(SourceUnusableError, match=why),
        ):
            BatchRun(source, output, report).missing()
    assert len(answers(tmp_path / "a")) == 5
