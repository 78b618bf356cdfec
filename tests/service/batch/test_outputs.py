"""Outputs of a run, and going on with them after an end at any byte."""

import contextlib
import json
import os
import resource

import pyarrow.parquet as pq
import pytest

from inferpool.service.batch.inputs import BatchAnswer, RunLostError, SourceUnusableError
from inferpool.service.batch.outputs import Journal, format_of

_ANSWERS = [
    BatchAnswer(index=0, name="a.jpg", label="cat", prediction=[{"label": "cat", "score": 0.5}]),
    BatchAnswer(index=1, name='b "\n.jpg', code="invalid_input", message="two\nlines"),
    BatchAnswer(index=2, name="ü.jpg", prediction=None),
]


_ABOUT = {"inputs": "a", "--model": "m"}


def journal(path, format="jsonl", *, about=_ABOUT, resumes=False, overwrites=False):
    """Open an output."""
    return Journal(str(path), format, about=about, resumes=resumes, overwrites=overwrites)


def write(path, format, answers, **options):
    """Write answers to a file, as a run does that is not killed."""
    with journal(path, format, **options) as file:
        earlier = list(file.earlier())
        file.write([each for each in answers if each not in earlier])
        file.finish()
    return earlier


def write_some(path, format="jsonl", answers=_ANSWERS[:2]):
    """Write answers to a file, as a run does that is killed."""
    with journal(path, format) as file:
        file.write(answers)


@contextlib.contextmanager
def files_at_most(num_bytes):
    """Let no file grow larger in the block, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_file_cut_at_any_byte_is_completed_to_the_same_file(tmp_path, format):
    write(tmp_path / "whole", format, _ANSWERS)
    whole = (tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for length in range(1, len(whole)):
        write_some(tmp_path / "note", format)
        cut.write_bytes(whole[:length])
        (tmp_path / "note.resume").rename(tmp_path / "cut.resume")
        (tmp_path / "note").unlink()
        write(cut, format, _ANSWERS, resumes=True)
        assert cut.read_bytes() == whole, length
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cut", "whole"]


def test_zeros_that_a_crash_of_the_system_left_are_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    write_some(path)
    with path.open("ab") as file:
        file.write(b'{"index": 2, ' + bytes(100) + b"\n" + bytes(100))
    assert write(path, "jsonl", _ANSWERS, resumes=True) == _ANSWERS[:2]
    assert len(path.read_bytes().splitlines()) == 3


def test_parquet_is_whole_or_not_there(tmp_path):
    path = tmp_path / "out.parquet"
    write_some(path, "parquet")
    assert not path.exists()
    assert write(path, "parquet", _ANSWERS, resumes=True) == _ANSWERS[:2]
    rows = pq.read_table(path).to_pylist()
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert json.loads(rows[0]["prediction"]) == _ANSWERS[0].prediction
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]
    assert write(path, "parquet", _ANSWERS, resumes=True) == _ANSWERS  # it was whole already


def test_an_output_that_exists_is_not_overwritten_by_chance(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, "jsonl", _ANSWERS)
    with pytest.raises(SourceUnusableError, match="--resume goes on"):
        write(path, "jsonl", _ANSWERS)
    assert write(path, "jsonl", _ANSWERS[:1], overwrites=True) == []
    assert len(path.read_bytes().splitlines()) == 1


def test_two_runs_cannot_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    why = pytest.raises(SourceUnusableError, match="another run is writing it")
    with journal(path), why:
        journal(path, resumes=True)


@pytest.mark.parametrize("text", ["a diary\n", "a diary", '{"index": 0}\n', "a\0diary\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with journal(path, resumes=True) as file:
        if text.endswith("\n"):
            with pytest.raises(SourceUnusableError, match="line 1 is not of such a run"):
                list(file.earlier())
        else:
            assert list(file.earlier()) == []
        assert file.is_over, "so nothing is added"
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_answers_of_other_inputs_or_another_model_are_not_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    write_some(path)
    before = path.read_bytes()
    for about, why in (
        ({"inputs": "b", "--model": "m"}, "begun with other inputs"),
        ({"inputs": "a", "--model": "n"}, "begun with --model m"),
    ):
        with pytest.raises(SourceUnusableError, match=why):
            journal(path, about=about, resumes=True)
        assert path.read_bytes() == before
    write(path, "jsonl", _ANSWERS, resumes=True)
    other = {"inputs": "b", "--model": "n"}
    assert write(path, "jsonl", _ANSWERS, about=other, overwrites=True) == []


def test_a_run_that_has_come_to_its_end_says_so(tmp_path):
    path = tmp_path / "out.csv"
    write(path, "csv", _ANSWERS)
    with journal(path, "csv", resumes=True) as file:
        assert file.is_over
        assert [each.index for each in file.earlier()] == [0, 1, 2]


def test_nothing_is_left_of_a_run_that_wrote_nothing(tmp_path):
    for format in ("jsonl", "parquet"):
        with journal(tmp_path / "out", format):
            assert list(tmp_path.iterdir()) != []
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_names_that_are_not_in_utf_8_are_written_and_read(tmp_path, format):
    path = tmp_path / f"out.{format}"
    odd = os.fsdecode(b"\xff.jpg")
    answer = BatchAnswer(index=0, name=odd, label=odd, prediction="\ud800")
    write(path, format, [answer])
    (found,) = write(path, format, [], resumes=True)
    assert (found.name, found.label) == ("\\udcff.jpg",) * 2
    assert found.prediction == "\ud800"


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_what_a_full_disk_has_no_room_for_is_written_later(tmp_path, format):
    path = tmp_path / f"out.{format}"
    answers = [BatchAnswer(index=index, name="x" * 100, prediction=index) for index in range(400)]
    why = pytest.raises(RunLostError, match="cannot be written")
    with journal(path, format) as file, files_at_most(30_010), why:
        file.write(answers)
    earlier = write(path, format, answers, resumes=True)
    assert earlier == answers[: len(earlier)]
    assert 100 < len(earlier) < 400
    assert len(write(path, format, [], resumes=True)) == 400


def test_a_parquet_file_that_has_no_room_is_written_later(tmp_path):
    path = tmp_path / "out.parquet"
    answers = [BatchAnswer(index=n, name=os.urandom(50).hex(), prediction=n) for n in range(400)]
    with journal(path, "parquet") as file:
        file.write(answers)
        with files_at_most(10_000), pytest.raises(RunLostError, match="cannot be written"):
            file.finish()
    assert not path.exists()
    assert write(path, "parquet", [], resumes=True) == answers
    assert pq.read_table(path).num_rows == 400
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def test_the_name_tells_the_format():
    assert format_of("a.csv", None) == "csv"
    assert format_of("-", None) == "jsonl"
    assert format_of("a.csv", "parquet") == "parquet"
    with pytest.raises(SourceUnusableError, match="does not say its format"):
        format_of("a.dat", None)


def test_what_is_no_file_is_no_output(tmp_path):
    os.mkfifo(tmp_path / "out.jsonl")
    for path in (
        *(tmp_path / "out.jsonl", tmp_path, tmp_path / "none" / "out.jsonl"),
        tmp_path / ("a" * 300 + ".jsonl"),
    ):
        with pytest.raises(SourceUnusableError, match=r"is no file|No such file|too long"):
            journal(path)
