"""Outputs of a run, and going on with them after an end at any byte."""

import json

import pyarrow.parquet as pq
import pytest

from inferpool.service.batch.inputs import BatchAnswer, SourceUnusableError
from inferpool.service.batch.outputs import Journal, format_of

_ANSWERS = [
    BatchAnswer(index=0, name="a.jpg", label="cat", prediction=[{"label": "cat", "score": 0.5}]),
    BatchAnswer(index=1, name='b "\n.jpg', code="invalid_input", message="two\nlines"),
    BatchAnswer(index=2, name="ü.jpg", prediction=None),
]


def write(path, format, answers, **options):
    """Write answers to a file, as a run does that is not killed."""
    with Journal(str(path), format, **({"resumes": False, "overwrites": False} | options)) as file:
        earlier = list(file.earlier())
        file.write([each for each in answers if each not in earlier])
        file.finish()
    return earlier


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_a_file_cut_at_any_byte_is_completed_to_the_same_file(tmp_path, format):
    write(tmp_path / "whole", format, _ANSWERS)
    whole = (tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        write(cut, format, _ANSWERS, resumes=True)
        assert cut.read_bytes() == whole, length


def test_parquet_is_whole_or_not_there(tmp_path):
    path = tmp_path / "out.parquet"
    with Journal(str(path), "parquet", resumes=False, overwrites=False) as file:
        file.write(_ANSWERS[:2])
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
    path = str(tmp_path / "out.jsonl")
    why = pytest.raises(SourceUnusableError, match="another run is writing it")
    with Journal(path, "jsonl", resumes=False, overwrites=False), why:
        Journal(path, "jsonl", resumes=True, overwrites=False)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("a diary\n")
    with pytest.raises(SourceUnusableError, match="line 1 is not of such a run"):
        write(path, "jsonl", _ANSWERS, resumes=True)
    assert path.read_text() == "a diary\n"


def test_the_name_tells_the_format():
    assert format_of("a.csv", None) == "csv"
    assert format_of("-", None) == "jsonl"
    assert format_of("a.csv", "parquet") == "parquet"
    with pytest.raises(SourceUnusableError, match="does not say its format"):
        format_of("a.dat", None)
