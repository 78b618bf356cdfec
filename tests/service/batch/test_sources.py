"""Sources of a run: each input can be read by its index, in any process."""

import contextlib
import io
import json
import os
import pickle
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inferpool.service.batch.inputs import SourceUnusableError
from inferpool.service.batch.sources import digest_of, open_source

_JPEG = b"\xff\xd8\xff"


def inputs(path, column=None, **options):
    """Return all inputs, read backwards by a copy such as a reader gets."""
    source = open_source(str(path), column=column, **options)
    source.read(0)  # what this opens is not for the copy
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own
    return [copy.read(index) for index in reversed(range(len(copy)))][::-1]


def put(folder, *names, data=_JPEG):
    """Write files that all have the same content."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_tar(path, files):
    """Write a tar of names and contents; a text is the target of a hard link."""
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.LNKTYPE, data
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def told(found):
    """Return what most tests compare of inputs."""
    return [(each.name, each.label) for each in found]


def test_subfolders_are_labels(tmp_path):
    for name in ("cat/a.jpg", "cat/b.JPG", "dog/c.png", "dog/.hidden"):
        put(tmp_path, name, data=name.encode())
    found = inputs(tmp_path)
    assert told(found) == [("cat/a.jpg", "cat"), ("cat/b.JPG", "cat"), ("dog/c.png", "dog")]
    assert found[1].data == b"cat/b.JPG"
    assert {each.kind for each in found} == {"image"}


def test_a_text_beside_the_subfolders_takes_no_labels_away_but_a_picture_does(tmp_path):
    put(tmp_path, "cat/a.jpg", "classes.csv")
    assert told(inputs(tmp_path)) == [("cat/a.jpg", "cat"), ("classes.csv", None)]
    put(tmp_path, "b.jpg")
    assert [label for _, label in told(inputs(tmp_path))] == [None, None, None]


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    put(tmp_path, "there/a.jpg", "here/dog/b.jpg")
    (tmp_path / "here" / "cat").symlink_to(tmp_path / "there")
    (tmp_path / "here" / "dog" / "up").symlink_to(tmp_path / "here")
    assert told(inputs(tmp_path / "here")) == [("cat/a.jpg", "cat"), ("dog/b.jpg", "dog")]


def test_what_is_no_file_is_an_error_in_its_place(tmp_path):
    put(tmp_path, "c.jpg")
    os.mkfifo(tmp_path / "a.jpg")  # to read it would wait for ever
    (tmp_path / "b.jpg").symlink_to("nowhere")
    assert [each.error for each in inputs(tmp_path)] == [
        "is no file", "cannot be read: No such file or directory", ""]  # fmt: skip


def test_a_folder_that_cannot_be_read_is_an_error_in_its_place():
    with tempfile.TemporaryDirectory(dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        put(folder, "cat/a.jpg", "dog/b.jpg", "dog/c.jpg")
        (folder / "dog" / "b.jpg").chmod(0)
        (folder / "cat").chmod(0)
        stack.callback((folder / "cat").chmod, 0o700)
        if os.geteuid() == 0:  # who may read all
            os.seteuid(65534)
            stack.callback(os.seteuid, 0)
        found = inputs(folder)
    assert [(each.name, each.error) for each in found] == [
        ("cat", "cannot be read: Permission denied"),
        ("dog/b.jpg", "cannot be read: Permission denied"),
        ("dog/c.jpg", ""),
    ]


def test_a_flat_folder_has_no_labels_and_a_glob_finds_a_part_of_it(tmp_path):
    put(tmp_path, "b.jpg", "a.png", "c.txt", data=b"text ")
    assert told(inputs(tmp_path)) == [("a.png", None), ("b.jpg", None), ("c.txt", None)]
    assert [each.data for each in inputs(tmp_path / "*.txt")] == [b'"text"']


def test_the_output_is_no_input(tmp_path):
    put(tmp_path, "a.jpg", "out.jsonl")
    assert told(inputs(tmp_path, without=[tmp_path / "out.jsonl"])) == [("a.jpg", None)]
    with pytest.raises(SourceUnusableError, match="would be overwritten"):
        open_source(str(tmp_path / "a.jpg"), without=[tmp_path / "a.jpg"])


def test_a_file_is_what_its_name_and_its_first_bytes_say(tmp_path):
    put(tmp_path, "a", "b.bin")
    put(tmp_path, "c.bin", data=b"raw")
    put(tmp_path, "d.json", data=b'{"b64": "aGk="}')
    put(tmp_path, "e.json", data=b"{no")
    put(tmp_path, "f.txt", data=b"l\xe4tin")
    put(tmp_path, "g.jpg", "h.txt", data=b"")
    assert [(each.kind, each.data, each.error[:16]) for each in inputs(tmp_path)] == [
        ("image", _JPEG, ""),
        ("image", _JPEG, ""),
        ("bytes", b"raw", ""),
        ("bytes", b"hi", ""),  # as in a call to a service
        ("bytes", b"", "malformed JSON: "),
        ("bytes", b"", "is not in UTF-8:"),
        ("bytes", b"", "is empty"),
        ("bytes", b"", "is empty"),
    ]


def test_a_list_names_files_and_a_missing_one_is_an_error_in_its_place(tmp_path):
    put(tmp_path, "a.jpg", os.fsdecode(b"\xff.jpg"), "b\u2028.jpg")
    (tmp_path / "list.txt").write_bytes(
        b"\xef\xbb\xbf# photos\r\na.jpg\tcat\r\n\nmissing.jpg\tdog\n\xff.jpg\n"
        + "b\u2028.jpg".encode()
    )
    found = inputs(tmp_path / "list.txt")
    assert [(each.data, each.label, each.error) for each in found] == [
        (_JPEG, "cat", ""),
        (b"", "dog", "cannot be read: No such file or directory"),
        (_JPEG, None, ""),
        (_JPEG, None, ""),
    ]


def test_a_tar_joins_the_files_of_a_sample(tmp_path):
    files = [
        ("x/1.jpg", b"one"),
        ("x/1.cls", b"7\n"),
        ("x/2.json", b'{"label": "cat", "width": 3}'),
        ("x/2.png", b"two"),
        ("x/3.jpg", b"three"),
        ("x/3.mask.png", b"mask"),
        ("x/._3.jpg", b"of a file system"),
        ("x/4.jpg", "x/1.jpg"),
        ("x/5.jpg", "x/none.jpg"),
        ("x/6.json", b'{"a": 1}'),
    ]
    found = inputs(make_tar(tmp_path / "set.tar", files))
    assert [(each.name, each.data, each.label) for each in found if not each.error] == [
        ("x/1.jpg", b"one", "7"),
        ("x/2.png", b"two", "cat"),
        ("x/3.jpg", b"three", None),
        ("x/4.jpg", b"one", None),
        ("x/6.json", b'{"a": 1}', None),
    ]
    assert [each.name for each in found if each.error] == ["x/5.jpg"]


def test_pictures_of_a_tar_whose_names_begin_alike_are_all_inputs(tmp_path):
    names = ["2024.05.01.jpg", "2024.05.02.jpg", "a.jpg", "a.png"]
    path = make_tar(tmp_path / "set.tar", [(name, _JPEG) for name in names])
    assert [each.name for each in inputs(path)] == names


def test_a_tar_that_is_cut_short_has_what_is_there_and_an_error(tmp_path):
    path = make_tar(tmp_path / "set.tar", [(f"{n}.jpg", bytes(700)) for n in range(4)])
    whole = path.read_bytes()
    size = 512 + 1024
    for length in (size + 1, size + 512, size + 600, 2 * size - 1, 2 * size, 4 * size):
        path.write_bytes(whole[:length])
        found = inputs(path)
        num_whole = sum(start + 512 + 700 <= length for start in range(0, 4 * size, size))
        assert [each.error for each in found[:num_whole]] == [""] * num_whole, length
        assert all(each.error for each in found[num_whole:])
        assert len(found) > num_whole
        assert "cut short" in found[-1].error
    damaged = whole[: 2 * size] + b"junk" * 128 + whole[2 * size + 512 :]
    for bad in (damaged, whole + whole):
        path.write_bytes(bad)
        assert "damaged, or another follows" in inputs(path)[-1].error
    assert len(inputs(path)) == 5


def test_rows_of_csv_may_hold_ends_of_lines_and_bytes_that_are_wrong(tmp_path):
    rows = '\ufeffid,text\n1,"a\nü"\n2,b\u2028c\n\n3\n4,'.encode() + b"l\xe4tin\n"
    (tmp_path / "t.csv").write_bytes(rows + b"5," + b"x" * 200_000 + b'\n6,"open\n7,rest\n')
    found = inputs(tmp_path / "t.csv", "text")
    assert [json.loads(each.data) for each in found[:2]] == ["a\nü", "b\u2028c"]
    assert found[2].error == "the row has 1 columns, too few"
    assert "is not in UTF-8" in found[3].error
    assert len(found[4].data) == 200_002
    assert "a quote is not closed" in found[5].error
    assert len(found) == 6
    with pytest.raises(SourceUnusableError, match="--column: id, text"):
        open_source(str(tmp_path / "t.csv"))


def test_a_line_that_is_no_json_is_an_error_in_its_place(tmp_path):
    deep = b"[" * 50_000 + b"]" * 50_000
    (tmp_path / "t.jsonl").write_bytes(
        b'{"x": [1]}\n\n{"x"\n{"y": 2}\n{"x": {"b64": "aGk="}}\n{"x": NaN}\n{"x": '
        + deep
        + b'}\n{"x": "\\ud800"}\n{"x": "end"}\n\n \n'
    )
    found = inputs(tmp_path / "t.jsonl", "x")
    assert [bool(each.error) for each in found] == [
        False, True, True, False, True, True, True, False]  # fmt: skip
    assert [each.data for each in found if not each.error] == [b"[1]", b"hi", b'"end"']
    assert found[2].error == "it has no field 'x'"


@pytest.mark.parametrize(
    ("line", "column", "error"),
    [
        (b'{"x": [1]', None, "malformed JSON: it ends too early, after 9 bytes"),
        (b'{"x": 1,}', None, "malformed JSON: trailing comma in object (byte 8)"),
        (b'{"x": [2, 1e999]}', None, "is no JSON value: inf at x[1]"),
        (b'{"x": [2, NaN]}', "x", "is no JSON value: nan at [1]"),
        (b'{"x": "\\ud800"}', None, "is no JSON value: half of a surrogate pair at x"),
        (
            b'{"x": 1%s}' % (b"0" * 5000),
            None,
            f"1{'0' * 29}... (5001 characters) at x is out of range",
        ),
    ],
)
def test_a_line_that_is_no_json_says_what_is_wrong_and_where(tmp_path, line, column, error):
    (tmp_path / "t.jsonl").write_bytes(b'{"x": 1, "y": NaN}\n' + line + b"\n")
    assert inputs(tmp_path / "t.jsonl", column)[1].error == error
    assert inputs(tmp_path / "t.jsonl", "x")[0].data == b"1"


def test_a_column_of_parquet_is_read_across_row_groups(tmp_path):
    (tmp_path / "p.jpg").write_bytes(b"photo")
    table = pa.table({"x": ["p.jpg", None, *map(str, range(500))]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=400)
    found = inputs(tmp_path / "t.parquet")
    assert (found[0].kind, found[0].data, found[1].data) == ("image", b"photo", b"null")
    assert [each.data for each in found[2:]] == [b'"%d"' % number for number in range(500)]
    pictures = [{"bytes": _JPEG, "path": "x"}, {"bytes": None, "path": "p.jpg"}]
    pq.write_table(pa.table({"i": pictures}), tmp_path / "t.parquet")
    assert [(each.kind, each.data) for each in inputs(tmp_path / "t.parquet")] == [
        ("image", _JPEG), ("image", b"photo")]  # fmt: skip


def test_what_cannot_be_a_source_says_why(tmp_path):
    for name in ("a.tar.gz", "b.parquet", "c.tar"):
        (tmp_path / name).write_bytes(b"none")
    for name, why in (
        ("missing", "no such file"),
        ("a.tar.gz", "unpack it"),
        ("b.parquet", "is no Parquet"),
        ("c.tar", "cannot be read"),
        ("*.jpg", "no inputs"),
    ):
        with pytest.raises(SourceUnusableError, match=why):
            open_source(str(tmp_path / name))
    with pytest.raises(SourceUnusableError, match="--column"):
        open_source(str(tmp_path), column="x")


def test_a_digest_changes_with_the_inputs(tmp_path):
    put(tmp_path, "p/a.jpg", "p/b.jpg")
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")

    def digests():
        table = [open_source(str(tmp_path / "t.csv"), column=each) for each in "xy"]
        return [digest_of(each) for each in (open_source(str(tmp_path / "p")), *table)]

    first = digests()
    assert digests() == first
    assert len(set(first)) == 3
    put(tmp_path, "p/b.jpg", data=b"more than before")
    (tmp_path / "t.csv").write_text("x,y\n1,22\n")
    assert not set(digests()) & set(first)
