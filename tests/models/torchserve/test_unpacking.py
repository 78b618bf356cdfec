import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from inferpool.models.errors import SourceError
from inferpool.models.torchserve.unpacking import unpacked
from tests.models.torchserve.archives import make_folder, make_mar


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"inferpool-archives-{os.getuid()}"


def hold(temporary: str, path: Path, end: Connection) -> None:
    tempfile.tempdir = temporary
    end.send(str(unpacked(path)))
    signal.pause()


class Holder:
    """A process that has an archive unpacked."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(tempfile.tempdir, path, theirs))
        self.process.start()
        self.pipe = ours

    def folder(self) -> Path:
        assert self.pipe.poll(60)
        return Path(self.pipe.recv())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def test_workers_share_a_folder_that_goes_once_all_of_them_are_killed(
    root: Path, tmp_path: Path
) -> None:
    path = make_mar(tmp_path / "toy.mar")
    holders = [Holder(path), Holder(path)]
    try:
        folder, other = (each.folder() for each in holders)
        assert folder == other
        assert (folder / "handler.py").is_file()
        assert root.stat().st_mode & 0o777 == 0o700
        holders[0].kill()
        (folder / "written").touch()
        unpacked(make_mar(tmp_path / "second.mar", name="second"))
        assert folder.is_dir()  # one of them lives
    finally:
        for each in holders:
            each.kill()
    third = unpacked(make_mar(tmp_path / "third.mar", name="third"))
    assert not folder.exists()
    assert third.is_dir()


def test_what_a_killed_worker_leaves_is_unpacked_anew(root: Path, tmp_path: Path) -> None:
    path = make_mar(tmp_path / "toy.mar")
    holder = Holder(path)
    folder = holder.folder()
    (folder / "handler.py").write_text("changed")
    holder.kill()
    draft = folder.with_name(".files.0123")  # of one that was killed while it unpacked
    draft.mkdir()
    assert (unpacked(path) / "handler.py").read_text() != "changed"
    assert not draft.exists()


def test_a_folder_is_served_where_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "toy")
    assert unpacked(folder) == folder


def test_a_place_that_others_can_write_to_is_refused(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(SourceError, match=r"not a folder of this user alone.*TMPDIR"):
        unpacked(make_mar(tmp_path / "toy.mar"))
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(SourceError, match="not a folder of this user alone"):
        unpacked(make_mar(tmp_path / "toy.mar"))
