"""The verb `import`, as a user calls it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inferpool.service.cli.main import run
from tests.models.torchserve.archives import HANDLER, make_folder, make_mar

Import = Callable[..., tuple[int, str, str]]


@pytest.fixture
def imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Import:
    """Run `inferpool import`; return the exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        try:
            status = run(["import", *args])
        except SystemExit as left:
            status = int(left.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_an_archive_becomes_a_folder_and_its_code_is_announced_and_not_run(
    imported: Import, tmp_path: Path
) -> None:
    make_mar(
        tmp_path / "toy.mar",
        {
            "handler.py": f"open('ran', 'w')\n{HANDLER}",
            "model-config.yaml": "batchSize: 4\n",
            "requirements.txt": "nothing-of-this-name\n",
        },
        requirementsFile="requirements.txt",
        configFile="model-config.yaml",
    )
    status, out, err = imported("toy.mar", "--output", "served")
    assert (status, err) == (0, "")
    assert (tmp_path / "served/handler.py").is_file()
    assert not list(tmp_path.rglob("ran"))
    for text in (
        "which is code",
        "Nothing of it has run",
        "name      toy, version 1.0",
        "handler   handler.py, its own code",
        "model-config.yaml: batchSize 4",
        "max_batch_size = 4",
        "files     4,",
        "pip install -r served/requirements.txt    # it asks for these packages; none was",
    ):
        assert text in out
    assert out.endswith("  inferpool serve served\n")


def test_a_folder_in_use_is_left_alone_and_force_replaces_an_import_alone(
    imported: Import, tmp_path: Path
) -> None:
    make_mar(tmp_path / "toy.mar")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo").touch()
    for flags, why in (((), "not empty; --force replaces"), (("--force",), "does not delete it")):
        status, _, err = imported("toy.mar", "--output", "mine", *flags)
        assert (status, why in err) == (2, True)
    assert os.listdir(tmp_path / "mine") == ["photo"]
    (tmp_path / "empty").mkdir()
    assert imported("toy.mar", "--output", "empty")[0] == 0
    (tmp_path / "empty/handler.py").write_text("old")
    (tmp_path / "empty/old").touch()
    assert imported("toy.mar", "--output", "empty")[0] == 2
    assert imported("toy.mar", "--output", "empty", "--force")[0] == 0
    assert (tmp_path / "empty/handler.py").read_text() == HANDLER
    assert sorted(os.listdir(tmp_path / "empty")) == ["MAR-INF", "handler.py"]
    (tmp_path / "bad.mar").write_bytes(b"PK")
    assert imported("bad.mar", "--output", "empty", "--force")[0] == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.mar", "empty", "mine", "toy.mar"]
    assert (tmp_path / "empty/handler.py").is_file()


@pytest.mark.parametrize(
    ("args", "status", "why"),
    [
        (("https://host/x.mar", "--output", "out"), 2, "nothing is downloaded"),
        (("lost.mar", "--output", "out"), 1, "there is no file lost.mar"),
        (("folder", "--output", "out"), 2, "a folder already: inferpool serve folder"),
        (("toy.mar",), 2, "--output"),
        (("toy.mar", "--output", "."), 2, "name a folder below this one"),
        (("toy.mar", "--output", "out/..", "--force"), 2, "name a folder below this one"),
        (("toy.mar", "other.mar", "--output", "out"), 2, "what is 'other.mar'"),
    ],
)
def test_wrong_arguments_are_explained(
    imported: Import, tmp_path: Path, args: tuple[str, ...], status: int, why: str
) -> None:
    make_mar(tmp_path / "toy.mar")
    make_folder(tmp_path / "folder")
    found, out, err = imported(*args)
    assert (found, why in err, out) == (status, True, "")
    assert not (tmp_path / "out").exists()


def test_names_in_an_archive_cannot_write_to_the_terminal(imported: Import, tmp_path: Path) -> None:
    make_mar(tmp_path / "toy.mar", name="toy\x1b[2J")
    _, out, _ = imported("toy.mar", "--output", "out")
    assert "\x1b" not in out


def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path) -> None:
    make_mar(tmp_path / "toy.mar", {"big": os.urandom(1 << 20)})
    code = (
        "import os, signal, inferpool.models.torchserve.unpacking as each\n"
        "write = each._write\n"
        "def slow(*args):\n"
        "    write(*args); print('begun', flush=True); signal.pause()\n"
        "each._write = slow\n"
        "from inferpool.service.cli.main import run\n"
        "raise SystemExit(run(['import', 'toy.mar', '--output', 'out']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    process.stdout.close()
    assert os.listdir(tmp_path) == ["toy.mar"]
