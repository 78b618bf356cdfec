import os
from pathlib import Path

from inferpool.models.files.opened import FileMark, mark_of
from inferpool.workers.host.replica_files import ModelFiles, _changed_since, _listed


def mark(path: Path) -> FileMark:
    found = mark_of(str(path))
    assert found is not None
    return found


def files(path: Path) -> ModelFiles:
    path.write_bytes(b"weights")
    made = ModelFiles([mark(path)])
    made.remember()
    return made


def test_what_is_as_it_was_has_not_changed(tmp_path: Path):
    assert files(tmp_path / "w").changed() == []


def test_the_same_bytes_in_another_file_are_the_same(tmp_path: Path):
    path = tmp_path / "w"
    made = files(path)
    (tmp_path / "draft").write_bytes(b"weights")
    os.utime(tmp_path / "draft", (1, 1))
    (tmp_path / "draft").replace(path)
    assert made.changed() == []
    assert made.differing([mark(path)]) == []


def test_other_bytes_of_the_same_length_have_changed(tmp_path: Path):
    path = tmp_path / "w"
    made = files(path)
    path.write_bytes(b"WEIGHTS")
    os.utime(path, (1, 1))
    assert made.changed() == [str(path)]
    assert made.differing([mark(path)]) == [str(path)]


def test_what_is_gone_or_no_file_any_more_has_changed(tmp_path: Path):
    path = tmp_path / "w"
    made = files(path)
    path.unlink()
    assert made.changed() == [str(path)]
    path.mkdir()
    assert made.changed() == [str(path)]


def test_what_nobody_could_remember_in_time_has_changed(tmp_path: Path):
    path = tmp_path / "w"
    path.write_bytes(b"weights")
    made = ModelFiles([mark(path)])
    os.utime(path, (1, 1))
    made.remember()
    assert made.changed() == [str(path)]


def test_files_that_only_one_of_them_opened_do_not_differ(tmp_path: Path):
    made = files(tmp_path / "w")
    (tmp_path / "other").write_bytes(b"")
    assert made.differing([mark(tmp_path / "other")]) == []


def test_a_change_while_it_is_loaded_is_seen(tmp_path: Path):
    path = tmp_path / "w"
    path.write_bytes(b"weights")
    before = mark(path)
    assert _changed_since([before]) == []
    path.write_bytes(b"more weights")
    assert _changed_since([before]) == [str(path)]


def test_many_files_are_listed_in_a_few_words():
    assert _listed(["a", "b"]) == "a, b"
    assert _listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
