"""Kinds of accelerator that other packages add."""

import sys
from pathlib import Path

import pytest

from inferpool.models.accelerator.kinds import CUDA, known_accelerators
from inferpool.workers.host.devices import find_host


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Add kinds by a package whose module has some text."""

    def add(module: str) -> None:
        (tmp_path / "added_kind.py").write_text(module)
        info = tmp_path / "added_kind-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added-kind\nVersion: 1\n")
        entry = "[inferpool.accelerators]\nadded = added_kind:KIND\n"
        (info / "entry_points.txt").write_text(entry)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delitem(sys.modules, "added_kind", raising=False)
    known_accelerators.cache_clear()
    yield add
    known_accelerators.cache_clear()


def test_kind_that_cannot_be_loaded_is_named_and_left_out(added, caplog: pytest.LogCaptureFixture):
    added("raise OSError('libadded.so: no such file')")
    assert [*known_accelerators()] == [CUDA]
    assert "the accelerator 'added' cannot be used" in caplog.text
    assert "libadded.so" in caplog.text


def test_kind_whose_library_is_missing_is_a_problem_of_the_host(added):
    added(
        "from inferpool.models.accelerator.kinds import Accelerator\n"
        "KIND = Accelerator(kind='added', visible='ADDED', management='no_such', collectives='')"
    )
    assert [each.kind for each in known_accelerators()] == ["added", "cuda"]
    assert "no_such" in find_host(None).problem
