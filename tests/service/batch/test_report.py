"""The report of a run."""

import io

from inferpool.service.batch.inputs import BatchAnswer
from inferpool.service.batch.report import BatchReport
from tests.e2e.running import until


def report_of(answers, elapsed_s=1.0):
    """Return what is told of answers."""
    stream = io.StringIO()
    report = BatchReport(stream, len(answers))
    for answer in answers:
        report.add(answer)
    report.tell(elapsed_s)
    return stream.getvalue()


def classified(label, *names, start=0):
    """Return an answer whose labels have indices in the order of `names`."""
    best = [{"label": name, "index": start + number} for number, name in enumerate(names)]
    return BatchAnswer(index=0, name="x", label=label, prediction=best)


def test_labels_are_compared_by_name():
    told = report_of([
        classified("cat", "cat", "dog"),
        classified("cat", "dog", "cat"),
        classified("dog", "fox", "cow"),
    ])  # fmt: skip
    assert "accuracy 33.33% of 3 labelled\n" in told
    rows = [line.split() for line in told.splitlines()[1:4]]
    assert rows == [
        ["label", "1", "2", "others"],
        ["1", "cat", "1", "1", "."],
        ["2", "dog", ".", ".", "1"],
    ]


def test_labels_are_compared_by_index_if_more_of_them_are_right_so():
    told = report_of([
        classified("7", "cat", start=7),
        classified("8", "dog", start=8),
        classified("8", "cat", start=7),
    ])  # fmt: skip
    assert "accuracy 66.67%" in told
    assert [line.split() for line in told.splitlines()[2:4]] == [
        ["1", "7", "1", ".", "."],
        ["2", "8", "1", "1", "."],
    ]


def test_folders_that_are_no_labels_of_the_model_are_told():
    told = report_of([classified("n01440764", "tench", start=0)])
    assert "accuracy 0.00%" in told
    assert "no answer has a label such as 'n01440764', by name or by index" in told


def test_many_labels_have_a_list_instead_of_a_table():
    answers = [classified(f"label {n}", f"label {n}") for n in range(30)]
    told = report_of([*answers, *[classified("label 3", "label 4")] * 2])
    assert "2 x label 3 taken for label 4\n" in told
    assert len(told.splitlines()) == 3


def test_every_figure_of_a_wide_table_is_there():
    names = [f"a label that is rather long, with number {n}" for n in range(20)]
    told = report_of([classified(name, name) for name in names])
    assert all(name in told for name in names)
    assert "…" not in told


def test_names_cannot_break_lines_or_give_orders_to_the_terminal():
    odd = "\x1b[31m[/b]\n\udcff"
    told = report_of([
        BatchAnswer(index=0, name=odd, code="x", message="two\nlines"),
        classified(odd, odd),
    ])  # fmt: skip
    assert told.splitlines()[0] == "\\x1b[31m[/b]\\n\\udcff: two\\nlines"
    assert "1  \\x1b[31m[/b]\\n\\udcff  1" in told


def test_answers_of_earlier_runs_do_not_count_for_the_rate():
    stream = io.StringIO()
    report = BatchReport(stream, 20)
    for index in range(15):
        report.add(BatchAnswer(index=index, name="x"), is_earlier=True)
    for index in range(5):
        report.add(BatchAnswer(index=index, name="x"))
    report.tell(2.0)
    assert stream.getvalue() == ("20 of 20 done (15 by an earlier run), 0 failed; 2.0 s, 2.5/s\n")


def test_a_thousand_failures_are_listed_and_the_others_counted():
    failed = [BatchAnswer(index=n, name=str(n), code="x", message="no") for n in range(1200)]
    told = report_of(failed).splitlines()
    assert told[999:1001] == ["999: no", "and 200 more, which the output names"]


def test_a_pipe_is_told_what_is_done_while_the_main_thread_does_it():
    stream = io.StringIO()
    report = BatchReport(stream, 2, line_s=0.001)
    importing = "inputs: 2; importing torch"
    report.start()
    until(lambda: stream.getvalue().startswith(f"{importing}\n{importing} (0 s)\n"))
    report.wait_for_model()
    until(lambda: "the model starts (0 s)\n" in stream.getvalue())
    report.begin()
    assert "the model is ready after 0." in stream.getvalue()
    report.add(BatchAnswer(index=0, name="x"))
    until(lambda: "1 of 2 done, 0 failed (0 s)\n" in stream.getvalue())
    report.stop()
    before = stream.getvalue()
    report.tell(0.1)
    assert stream.getvalue() == before + "1 of 2 done, 0 failed; 0.1 s, 10.0/s\n"


def test_a_quiet_run_says_nothing():
    stream = io.StringIO()
    report = BatchReport(stream, 2, is_quiet=True)
    report.start()
    report.wait_for_model()
    report.begin()
    report.stop()
    assert stream.getvalue() == ""
