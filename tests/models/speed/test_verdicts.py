import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from inferpool.models.speed.choose import choose
from inferpool.models.speed.verdicts import VerdictStore
from inferpool.models.speed_names import SpeedReport
from tests.models.speed.pace import Pace, quietly, small

REPORT = SpeedReport(preset="folded", gain=2.0, key="key", note="as good as exact")
CONTENT = bytes(range(256)) * 100


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def put_folder(path: Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


CHANGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip_a_bit,
    "cut": lambda path: path.write_bytes(
        path.read_bytes()[: random.randrange(path.stat().st_size)]
    ),
    "extended": lambda path: path.write_bytes(
        path.read_bytes() + random.randbytes(random.randint(1, 99))
    ),
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    **CHANGES,
    "empty": lambda path: path.write_bytes(b""),
    "nested": lambda path: path.write_bytes(b'{"note":' + b"[" * 100_000),
    "folder": put_folder,
    "pipe": put_pipe,
    "dead link": put_dead_link,
}


def made_package(store: VerdictStore) -> Path:
    store.make_package("key", "compiled", lambda draft: draft.write_bytes(CONTENT) and None)
    path = store.package("key", "compiled")
    assert path is not None
    return path


@pytest.fixture(autouse=True)
def known_chance():
    random.seed(0)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_verdict_is_made_again(tmp_path: Path, damage: str, caplog):
    for _ in range(20 if damage in CHANGES else 2):
        caplog.clear()
        store = VerdictStore(tmp_path)
        store.write("key", REPORT)
        assert store.read("key") == REPORT
        DAMAGES[damage](tmp_path / "key.json")
        assert store.read("key") is None
        assert store.read("key") is None
        assert len(caplog.messages) == (damage != "dead link")
    store.write("key", REPORT)
    assert store.read("key") == REPORT


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_package_is_made_again(tmp_path: Path, damage: str):
    store = VerdictStore(tmp_path)
    for _ in range(20 if damage in CHANGES else 2):
        path = made_package(store)
        assert path.read_bytes().startswith(CONTENT)
        DAMAGES[damage](path)
        assert store.package("key", "compiled") is None
        assert VerdictStore(tmp_path).package("key", "compiled") is None


_LOAD = """
import os, sys, tempfile
from pathlib import Path
from typing import cast
from inferpool.models.speed.verdicts import VerdictStore
store = VerdictStore(Path(sys.argv[1]))
with store.loading(store.package("key", "compiled")):
    # As torch does, which unpacks a package into TMPDIR.
    os.mkdir(os.path.join(os.environ["TMPDIR"], "aotinductor_x"))
    print("loading", flush=True)
    sys.stdin.read()
"""


def loader(folder: Path, temp: Path) -> "subprocess.Popen[bytes]":
    """A process that is loading a package for as long as its input is open."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temp), "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    return process


def test_a_package_that_killed_its_process_is_set_aside(tmp_path: Path, caplog):
    cache, temp = tmp_path / "cache", tmp_path / "temp"
    cache.mkdir(), temp.mkdir()
    store = VerdictStore(cache)
    path = made_package(store)
    with loader(cache, temp) as dies, store.loading(path):
        assert store.package("key", "compiled"), "both are alive"
        dies.send_signal(signal.SIGSEGV)
        dies.wait(60)
        assert store.package("key", "compiled") is None
        assert "was being loaded when a process died" in caplog.text
        assert made_package(store), "a new one is not to blame"
    assert sorted(path.name for path in cache.iterdir()) == [
        "key-compiled.pt2",
        "key-compiled.pt2.aside",
    ]
    assert not list(temp.iterdir())


def test_a_package_of_a_cache_that_can_only_be_read_is_loaded(tmp_path: Path, monkeypatch):
    store = VerdictStore(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    path = made_package(store)
    make = tempfile.mkdtemp

    def refuse(*, prefix: str, dir: Path | None = None) -> str:
        if dir is not None:
            raise PermissionError(13, "Permission denied")
        return make(prefix=prefix, dir=tmp_path)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with store.loading(path):
        assert os.environ["TMPDIR"].startswith(str(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_a_package_that_cannot_be_loaded_is_set_aside_but_not_for_want_of_time(tmp_path: Path):
    store = VerdictStore(tmp_path)
    for error, is_left in ((TimeoutError(), True), (RuntimeError("no model in it"), False)):
        path = made_package(store)
        with pytest.raises(type(error)), store.loading(path):
            raise error
        assert (store.package("key", "compiled") is not None) == is_left


def test_a_compiled_preset_that_is_named_is_made_again_if_it_cannot_be_loaded(
    tmp_path: Path, pace: Pace
):
    made: list[Path] = []

    def compile_package(network: object, preset: str, path: Path) -> None:
        made.append(path)
        path.write_bytes(b"good" if len(made) > 1 else b"bad")

    def load(path: Path, exact: torch.nn.Module | None, device: torch.device) -> torch.nn.Module:
        if path.read_bytes().startswith(b"bad"):
            raise RuntimeError("no model in it")
        return cast("torch.nn.Module", small().network)

    wanted = pace.options("compiled", tmp_path, compile_package=compile_package, load_package=load)
    assert choose(pace.small(), wanted, quietly).preset == "compiled"
    assert len(made) == 2
