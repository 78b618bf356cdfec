import subprocess
import sys
from pathlib import Path

import pytest

_NOTE = """
import json, os, subprocess, sys, tempfile
from pathlib import Path
from inferpool.models.files.opened import OpenedFiles
sys.path.insert(0, os.getcwd())
opened = OpenedFiles(sys.argv[1])
open("before").read()
with opened.noting():
{body}
open("after").read()
print(json.dumps(sorted(Path(mark.path).name for mark in opened.marks())))
"""
ROOT = Path(__file__).parents[3]


def noted(folder: Path, body: str, source: str = "net:Net") -> str:
    """Run a few lines in their own process, and return the names of the recorded files."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    for name in ("before", "after", "weights"):
        (folder / name).write_text("1")
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", _NOTE.format(body=lines), source],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "body",
    [
        "open('weights').read()",
        "Path('weights').read_bytes()",
        "os.close(os.open('weights', os.O_RDONLY))",
        "import threading as t\na = t.Thread(target=open, args=['weights'])\na.start(), a.join()",
        "from inferpool.models.files.opened import announce\nannounce(Path('weights'))",
        "from inferpool.models.files.opened import announce\n"
        "part = Path(tempfile.gettempdir(), 'weights')\n"
        "subprocess.run(['cp', 'weights', part])\nannounce(part)",
    ],
)
def test_opened_files_are_recorded(tmp_path: Path, body: str):
    assert noted(tmp_path, body) == '["weights"]'


def test_a_process_hears_of_events_by_one_hook_however_often_it_records(tmp_path: Path):
    body = (
        "names = []\nsys.addaudithook(lambda name, _: names.append(name))\n"
        "for _ in range(2):\n    with OpenedFiles('net:Net').noting():\n"
        "        open('weights').read()\n"
        "assert 'open' in names and 'sys.addaudithook' not in names"
    )
    assert noted(tmp_path, body) == '["weights"]'


def test_modules_are_noted_by_their_source_even_if_they_are_cached(tmp_path: Path):
    (tmp_path / "net.py").write_text("import part")
    (tmp_path / "part.py").write_text("")
    for _ in range(2):
        assert noted(tmp_path, "import net") == '["net.py", "part.py"]'


@pytest.mark.parametrize(
    "body",
    [
        "open('weights', 'a').close()\nopen('weights').read()",
        "open('/proc/self/stat').read()\nopen(0, closefd=False)",
        "import wave, multipart\nimport inferpool.models.spec",
        "Path('folder').mkdir(exist_ok=True)\nos.listdir('folder')",
        "os.rename('weights', 'cache')\nopen('cache').read()",
        "os.mkdir('made')\nsubprocess.run(['cp', 'weights', 'made'])\nopen('made/weights').read()",
        "open('weights').read()\nos.unlink('weights')",
        "with tempfile.TemporaryDirectory() as made:\n"
        "    subprocess.run(['cp', 'weights', made])\n    open(f'{made}/weights').read()\n"
        "part = tempfile.gettempdir() + '/part'\nsubprocess.run(['cp', 'weights', part])\n"
        "open(part).read()",
    ],
    ids=[
        "written",
        "the system's",
        "libraries",
        "folders",
        "renamed",
        "in a folder of its own",
        "gone",
        "temporary",
    ],
)
def test_files_that_are_not_part_of_the_model_are_left_out(tmp_path: Path, body: str):
    assert noted(tmp_path, body) == "[]"


def test_the_models_own_package_is_noted_where_it_is_installed(tmp_path: Path):
    assert "__init__.py" in noted(tmp_path, "import multipart", "multipart:Net") or (
        "multipart.py" in noted(tmp_path, "import multipart", "multipart:Net")
    )
