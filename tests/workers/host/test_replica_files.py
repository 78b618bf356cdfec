import os
from pathlib import Path

import pytest

from inferpool.models.files.opened import FileMark, mark_of
from inferpool.workers.host.engine import Ending, WorkerId
from inferpool.workers.host.replica_files import (
    ModelFiles,
    ReplicaFiles,
    _changed_since,
    _listed,
)
from inferpool.workers.shared.errors import FilesChangedError, WorkerStartError


def mark(path: Path) -> FileMark:
    found = mark_of(str(path))
    assert found is not None
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize(("content", "is_same"), [(b"weights", True), (b"WEIGHTS", False)])
def test_a_replaced_file_has_changed_only_if_its_bytes_have(
    path: Path, content: bytes, is_same: bool
):
    files = ModelFiles([mark(path)])
    files.remember()
    assert files.changed() == []
    draft = path.with_name("draft")
    draft.write_bytes(content)
    os.utime(draft, (1, 1))
    draft.replace(path)
    assert files.changed() == ([] if is_same else [str(path)])
    assert files.differing([mark(path)]) == ([] if is_same else [str(path)])


def test_a_file_that_is_gone_or_became_a_folder_has_changed(path: Path):
    files = ModelFiles([mark(path)])
    path.unlink()
    assert files.changed() == [str(path)]
    path.mkdir()
    assert files.changed() == [str(path)]


def test_a_file_that_changed_before_it_was_hashed_has_changed(path: Path):
    files = ModelFiles([mark(path)])
    os.utime(path, (1, 1))
    files.remember()
    assert files.changed() == [str(path)]


def test_files_that_only_one_worker_opened_do_not_differ(path: Path):
    files = ModelFiles([mark(path)])
    path.with_name("other").write_bytes(b"")
    assert files.differing([mark(path.with_name("other"))]) == []


def test_a_change_during_the_load_is_seen(path: Path):
    before = mark(path)
    assert _changed_since([before]) == []
    path.write_bytes(b"more weights")
    assert _changed_since([before]) == [str(path)]


def test_many_files_are_listed_in_a_few_words():
    assert _listed(["a", "b"]) == "a, b"
    assert _listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def far(digest: bytes) -> FileMark:
    """Return the mark of a file that is not on this host."""
    return FileMark("/far/weights", 7, 1, 2, digest)


def test_files_of_other_hosts_are_compared_by_their_digests_alone():
    files = ModelFiles([far(b"a")])
    files.remember()
    assert files.changed() == []  # nobody looks for it on this host
    assert files.differing([FileMark("/far/weights", 7, 3, 4, b"a")]) == []
    assert files.differing([far(b"b")]) == ["/far/weights"]


class FarWorker:
    id = WorkerId(model="m", slot=0)
    has_worked = False

    def __init__(self, *files: FileMark) -> None:
        self.files = files

    async def wait(self) -> Ending:
        raise NotImplementedError

    async def stop(self, grace_s: float) -> None:
        raise NotImplementedError


async def test_a_host_with_other_files_is_refused_while_workers_serve_with_the_first_ones():
    files = ReplicaFiles[FarWorker](lambda worker: worker.files)
    first = await files.judge(FarWorker(far(b"a")), lambda: False, renews=False)
    assert first is not None
    files.adopt(first)
    assert await files.judge(FarWorker(far(b"a")), lambda: True, renews=False) is None
    with pytest.raises(FilesChangedError, match="/far/weights differ from"):
        await files.judge(FarWorker(far(b"b")), lambda: True, renews=False)
    assert await files.judge(FarWorker(far(b"b")), lambda: True, renews=True)
    assert await files.judge(FarWorker(far(b"b")), lambda: False, renews=False)
    await files.close()


async def test_a_file_without_a_digest_changed_while_a_far_worker_loaded_it():
    files = ReplicaFiles[FarWorker](lambda worker: worker.files)
    with pytest.raises(WorkerStartError, match="changed on disk while"):
        await files.judge(FarWorker(far(b"")), lambda: False, renews=False)
