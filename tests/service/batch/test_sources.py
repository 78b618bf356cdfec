"""Sources of a run: each input can be read by its index, in any process."""

import io
import json
import pickle
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inferpool.service.batch.inputs import SourceUnusableError
from inferpool.service.batch.sources import open_source


def inputs(path, column=None):
    """Return all inputs, read backwards by a copy such as a reader gets."""
    source = pickle.loads(pickle.dumps(open_source(str(path), column=column)))  # noqa: S301 - our own
    return [source.read(index) for index in reversed(range(len(source)))][::-1]


def test_subfolders_are_labels(tmp_path):
    for name in ("cat/a.jpg", "cat/b.JPG", "dog/c.png", "dog/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    found = inputs(tmp_path)
    assert [(each.name, each.label) for each in found] == [
        ("cat/a.jpg", "cat"), ("cat/b.JPG", "cat"), ("dog/c.png", "dog")]  # fmt: skip
    assert found[1].data == b"cat/b.JPG"
    assert {each.kind for each in found} == {"image"}


def test_a_flat_folder_has_no_labels_and_a_glob_finds_a_part_of_it(tmp_path):
    for name in ("b.jpg", "a.png", "c.txt"):
        (tmp_path / name).write_text("text")
    assert [(each.name, each.label) for each in inputs(tmp_path)] == [
        ("a.png", None), ("b.jpg", None), ("c.txt", None)]  # fmt: skip
    assert [each.data for each in inputs(tmp_path / "*.txt")] == [b'"text"']


def test_a_list_names_files_and_a_missing_one_is_an_error_in_its_place(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "list.txt").write_text("# photos\na.jpg\tcat\nmissing.jpg\tdog\n")
    first, second = inputs(tmp_path / "list.txt")
    assert (first.data, first.label) == (b"a", "cat")
    assert (second.error, second.label) == ("cannot be read: No such file or directory", "dog")


def test_a_tar_joins_the_files_of_a_sample(tmp_path):
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name, data in (("x/1.jpg", b"one"), ("x/1.cls", b"7\n"), ("x/2.png", b"two")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    found = inputs(tmp_path / "set.tar")
    assert [(each.name, each.data, each.label) for each in found] == [
        ("x/1.jpg", b"one", "7"), ("x/2.png", b"two", None)]  # fmt: skip


def test_rows_of_csv_may_hold_ends_of_lines(tmp_path):
    (tmp_path / "t.csv").write_bytes('\ufeffid,text\n1,"a\nü"\n2,b\n3\n'.encode())
    first, second, third = inputs(tmp_path / "t.csv", "text")
    assert (json.loads(first.data), json.loads(second.data)) == ("a\nü", "b")
    assert third.error == "the row has 1 columns, too few"
    with pytest.raises(SourceUnusableError, match="--column: id, text"):
        open_source(str(tmp_path / "t.csv"))


def test_a_line_that_is_no_json_is_an_error_in_its_place(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"x": [1]}\n{"x"\n{"y": 2}\n{"x": "end"}')
    found = inputs(tmp_path / "t.jsonl", "x")
    assert [bool(each.error) for each in found] == [False, True, True, False]
    assert (found[0].data, found[3].data) == (b"[1]", b'"end"')
    assert found[2].error == "it has no field 'x'"


def test_a_column_of_parquet_is_read_across_row_groups(tmp_path):
    (tmp_path / "p.jpg").write_bytes(b"photo")
    table = pa.table({"x": ["p.jpg", "a", "b", "c", "d"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    found = inputs(tmp_path / "t.parquet")
    assert (found[0].kind, found[0].data) == ("image", b"photo")
    assert [each.data for each in found[1:]] == [b'"a"', b'"b"', b'"c"', b'"d"']
    pq.write_table(pa.table({"i": [{"bytes": b"jpeg", "path": "x"}]}), tmp_path / "t.parquet")
    assert [(each.kind, each.data) for each in inputs(tmp_path / "t.parquet")] == [
        ("image", b"jpeg")]  # fmt: skip


def test_what_cannot_be_a_source_says_why(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"")
    (tmp_path / "b.parquet").write_bytes(b"none")
    for name, why in (
        ("missing", "no such file"),
        ("a.tar.gz", "unpack it"),
        ("b.parquet", "is no Parquet"),
        ("*.jpg", "no inputs"),
    ):
        with pytest.raises(SourceUnusableError, match=why):
            open_source(str(tmp_path / name))
    with pytest.raises(SourceUnusableError, match="--column"):
        open_source(str(tmp_path), column="x")
