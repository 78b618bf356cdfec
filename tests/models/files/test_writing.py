from pathlib import Path

import pytest

from inferpool.models.files.writing import lock, replacing


def test_a_file_is_replaced_whole(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with replacing(path) as draft:
        draft.write_bytes(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert [*tmp_path.iterdir()] == [path]


def test_what_cannot_be_replaced_stays_as_it_was(tmp_path: Path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(IsADirectoryError), replacing(path) as draft:
        draft.write_bytes(b"after")
    assert [*tmp_path.iterdir()] == [path]


def test_a_locked_file_is_refused_until_it_is_closed(tmp_path: Path):
    path = tmp_path / "file"
    with path.open("w") as first, path.open("w") as second:
        lock(first)
        with pytest.raises(BlockingIOError):
            lock(second)
        first.close()
        lock(second)
