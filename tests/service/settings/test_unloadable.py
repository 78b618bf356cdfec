"""Models that certainly cannot be loaded are refused before torch is imported."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferpool.models.files.kinds import KINDS, kind_of
from inferpool.service.checks.weights import weights_file
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.model_sources import packages_to_preload, torchvision_models
from inferpool.service.settings.unloadable import problem_of
from tests.run_folders import TINY, write_run

_RUN_EACH = """
import contextlib, io, json, sys
from inferpool.service.cli.main import run

for argv in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = run(argv)
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""


def run_each(commands: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, str, bool]]:
    """Run commands one after another in a process; return status, stderr, whether with torch."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN_EACH],
        input=json.dumps(commands),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def write(folder: Path) -> None:
    """Write files that are no models, and modules."""
    (folder / "poet").mkdir()
    (folder / "poet" / "config.json").write_text('{"architectures": ["GptForCausalLM"]}')
    for name in ("lfs.onnx", "lfs.skops"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    (folder / "net.bin").write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x052.2.1")
    (folder / "lfs.pt2").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    (folder / "page.pth").write_text("<!DOCTYPE html><html></html>")
    (folder / "folder").mkdir()
    (folder / "folder" / "broken.py").write_text("return 1\n")
    (folder / "odd.xyz").write_text("odd")
    (folder / "broken.py").write_text("class Net:\n    def forward(self)\n")
    (folder / "fine.py").write_text(
        "import torch.nn as nn\nfrom torch import nn\nclass Net(nn.Module):\n    pass\n"
        "class Own(Base):\n    pass\n"
    )
    (folder / "inferpool.toml").write_text('[models.cats]\nsource = "fine:Net"\nweights = "a.pth"')
    (folder / "two.toml").write_text(
        '[models.a]\nsource = "no_such_module:Net"\n[models.b]\nsource = "./gone"'
    )


CASES = [
    (["serve", "gone.pt2"], "MODEL: there is no file gone.pt2 (looked for from "),
    (["serve", "no_such_module:Net"], "MODEL: there is no module 'no_such_module': it must be"),
    (["serve", "fin:Net"], ", which has fine"),
    (["serve", "fine.py:Net"], "a module is named without .py: fine:CLASS"),
    (["serve", "broken:Net"], "module 'broken' fails on import: SyntaxError: expected ':' ("),
    (["serve", "gone.py:Net"], "MODEL: there is no module 'gone': it must be installed"),
    (["serve", "folder.broken:Net"], "module 'folder.broken' fails on import: SyntaxError: 'retur"),
    (
        ["serve", "efficientnet_lite0", "--weights", "gone"],
        "--weights: gone: there is no such file",
    ),
    (["serve", "echo", "--weights", "a.pth"], "echo takes no weights, but was given 'a.pth'"),
    (["serve", "torchvision:resnet81"], "detector or segmenter 'resnet81': did you mean resnet18"),
    (["serve", "torchvision:resnet18", "--weights", "gone.pth"], "--weights: gone.pth: there is"),
    (["serve", "fine:Net", "--weights", "gone.pth"], "--weights: gone.pth: there is no such file"),
    (["serve", "encoder:gone"], "MODEL: there is no folder gone"),
    (["serve", "./gone"], "MODEL: there is no folder gone"),
    (["serve", "net.bin"], "net.bin is an ONNX file: give it a name that ends in .onnx"),
    (["serve", "gone.onnx"], "MODEL: there is no file gone.onnx (looked for from "),
    (["serve", "lfs.onnx"], "lfs.onnx is a pointer of Git LFS"),
    (["serve", "lfs.skops"], "lfs.skops is a pointer of Git LFS"),
    (["serve", "transformers:gone"], "set options.download = true"),
    (["serve", "transformers:poet"], "poet/config.json names GptForCausalLM; served are networks"),
    (["serve", "./poet"], "poet/config.json names GptForCausalLM; served are networks of *For"),
    (["serve", "reranker:poet"], "poet/config.json names GptForCausalLM; a reranker is a *ForSeq"),
    (["serve", "odd.xyz"], "odd.xyz is a file of an unknown kind: a source is "),
    (["serve", "lfs.pt2"], "lfs.pt2 is a pointer of Git LFS, not the file itself: run `git lfs"),
    (["serve", "lfs.pt2", "--debug"], "MODEL: lfs.pt2 is a pointer of Git LFS"),
    (["serve", "cats"], "inferpool.toml: models.cats.weights: a.pth: there is no such file"),
    (["serve"], "inferpool.toml: models.cats.weights: a.pth: there is no such file"),
    (["serve", "--config", "two.toml"], "two.toml: models.b.source: there is no folder gone"),
    (["serve", "efficientnet_lite0", "--weights", "page.pth"], "page.pth is a page of HTML"),
    (["batch", "*.py", "--model", "gone.pt2"], "MODEL: there is no file gone.pt2"),
    (["tune", "no_such_module:Net", "--force"], "MODEL: there is no module 'no_such_module'"),
    (["chaos", "gone.pt2"], "MODEL: there is no file gone.pt2"),
]


def test_each_command_names_what_cannot_be_loaded_without_torch(tmp_path: Path):
    write(tmp_path)
    answers = run_each([command for command, _ in CASES], tmp_path)
    for (command, said), (status, text, has_torch) in zip(CASES, answers, strict=True):
        assert said in text, (command, text)
        assert (status, has_torch, "Traceback" in text) == (2, False, False), command


def test_settings_that_a_file_has_for_a_model_of_the_same_name_are_named(tmp_path: Path):
    (tmp_path / "mlp.pt2").write_bytes(SAMPLES["export"])
    (tmp_path / "inferpool.toml").write_text(
        '[models.mlp]\nsource = "nets:Mlp"\nweights = "w.pth"\noptions = { hidden = 8 }\n'
    )
    ((status, said, _),) = run_each([["batch", "*", "--model", "mlp.pt2"]], tmp_path)
    assert (status, said.splitlines()) == (
        2,
        [
            "inferpool batch: mlp.pt2 is served as mlp, so these settings of that model hold for "
            "it too: weights, options.hidden (inferpool.toml: models.mlp)",
            "inferpool: inferpool.toml: models.mlp.weights: mlp.pt2 takes no weights, but was "
            "given 'w.pth'",
        ],
    )


def test_a_file_with_one_model_that_may_work_is_worth_a_start(tmp_path: Path, monkeypatch):
    from inferpool.service.settings.loader import load
    from inferpool.service.settings.unloadable import check_loadable

    monkeypatch.chdir(tmp_path)
    Path("inferpool.toml").write_text('[models.a]\nsource = "gone.pt2"\n[models.echo]\n')
    loaded = load({}, {}, tmp_path)
    check_loadable(loaded.settings, loaded.origins)


def model(source: str, weights: str = "DEFAULT") -> ModelSettings:
    return ModelSettings(source=source, weights=weights)


def test_what_only_the_users_code_can_tell_is_left_to_the_load(tmp_path: Path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import sys\n")
    for source, weights in (
        ("fine:FromElsewhere", "DEFAULT"),
        ("fine:Own", "some/name"),  # a class of its own may call anything its weights
        ("pack.gone:Net", "DEFAULT"),
        ("torchvision:resnet18", "IMAGENET1K_V9"),
        ("echo", "DEFAULT"),
        ("efficientnet_lite0", "None"),
        ("echo", "NONE"),
    ):
        assert problem_of(model(source, weights)) is None
    write_run(tmp_path / "run", model=TINY)
    assert problem_of(model(str(tmp_path / "run"))) is None
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "model.safetensors: there is no such file" in str(
        problem_of(model(str(tmp_path / "run")))
    )


ODD = [
    ("a" * 300 + ".pt", "DEFAULT", "cannot be read: File name too long"),
    ("encoder:" + "a" * 300, "DEFAULT", "cannot be read: File name too long"),
    ("efficientnet_lite0", "a" * 300, "cannot be read: File name too long"),
    ("loop.pt", "DEFAULT", "loop.pt cannot be read: Too many levels of symbolic links"),
    ("torchvision:resnet18", "loop.pt/w.pth", "cannot be read: Too many levels"),
    ("fine:Net", "pipe.pth", "pipe.pth: there is no such file"),
    ("a\0.pt", "DEFAULT", "there is no file a\0.pt"),
    ("nul:Net", "DEFAULT", "cannot contain null bytes (%s/nul.py)"),
    ("deep:Net", "DEFAULT", None),
    ("a/b\0", "DEFAULT", None),
    ("./fine.py:Net", "DEFAULT", "a module is named without .py: fine:CLASS"),
    ("./fine:Net", "DEFAULT", "a module is named with dots: fine:CLASS"),
    ("../fine:Net", "DEFAULT", "or lie under %s"),
]


@pytest.mark.parametrize(
    ("source", "weights", "said"), ODD, ids=[repr(each[:2])[:40] for each in ODD]
)
def test_odd_names_and_files_raise_nothing(tmp_path, monkeypatch, source, weights, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "nul.py").write_bytes(b"x\0")
    (tmp_path / "deep.py").write_text("x = " + "-" * 50_000 + "1")
    found = problem_of(model(source, weights))
    assert (found is None) == (said is None)
    weights_file(model(source, weights))  # of the check that `doctor` makes
    assert said is None or said.replace("%s", str(tmp_path)) in str(found and found[1])


def test_a_run_in_a_folder_that_is_called_like_a_file_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "cats.pt", model=TINY)
    assert problem_of(model("cats.pt")) is None


def test_modules_are_looked_for_in_the_order_of_the_worker(tmp_path, monkeypatch):
    first, here = tmp_path / "first", tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(sys, "path", [str(first), str(here), *sys.path])
    monkeypatch.chdir(here)
    assert problem_of(model("order_of_mine:Net")) is not None
    first.mkdir()
    (first / "order_of_mine.py").write_text("")
    assert problem_of(model("order_of_mine:Net")) is None
    (here / "order_of_mine.py").write_text("this is no Python\n")
    assert problem_of(model("order_of_mine:Net")) is None


def test_modules_in_odd_places_are_left_to_the_load(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for file in (
        *("here/space_of_mine/a/net.py", "there/space_of_mine/b/c/net.py", "there/only_linked.py"),
        "here/space_of_mine/a/broken.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("class Net\n" if "broken" in file else "")
    (here / "linked.py").symlink_to(there / "only_linked.py")
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for name in ("in_my_zip.py", "pack_in_my_zip/__init__.py", "pack_in_my_zip/net.py"):
            archive.writestr(name, "")
    (here / "only_bytecode.pyc").write_bytes(b"")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(there), str(tmp_path / "mine.zip")])
    for module in (
        *("space_of_mine.a.net", "space_of_mine.b.c.net", "space_of_mine.b.d.net", "linked"),
        *("in_my_zip", "pack_in_my_zip.net", "only_bytecode", "json.decoder", "sys"),
    ):
        assert problem_of(model(f"{module}:Net")) is None, module
        packages_to_preload([f"{module}:Net"], here)
    assert "broken.py:1)" in str(problem_of(model("space_of_mine.a.broken:Net")))


NO_NETWORKS = [
    "from torch import nn\nclass Net(nn.Module): pass\nNet = wrapped(Net)\n",
    "from torch import nn\nclass Net(nn.Module): pass\nfrom elsewhere import *\n",
    "from torch import nn\nclass Net(nn.Module): pass\nif True:\n    from a import B as Net\n",
    "from torch import nn\nclass Net(nn.Module): pass\nif True:\n    class Net(Own): pass\n",
    "from torch import nn\nclass Net(nn.Module): pass\nglobals()['Net'] = Own\n",
    "from torch import nn\nclass Net(nn.Module, metaclass=Own): pass\n",
    "import mine.nn as nn\nclass Net(nn.Module): pass\n",
    "from .torch import nn\nclass Net(nn.Module): pass\n",
    "from mine import nn\nclass Net(nn.Module): pass\n",
]


@pytest.mark.parametrize("text", NO_NETWORKS)
def test_a_class_that_may_be_no_network_names_its_weights_as_it_likes(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_of_mine.py").write_text(text)
    assert problem_of(model("nets_of_mine:Net", "v2")) is None


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass Net(torch.nn.Module): pass\n",
        "import torch.nn as nn\nclass Net(nn.Module): pass\n",
        "from torch.nn import Module\nclass Net(Module): pass\n",
    ],
)
def test_a_class_that_is_a_network_has_files_of_weights(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_of_mine.py").write_text(text)
    assert "v2: there is no such file" in str(problem_of(model("nets_of_mine:Net", "v2")))


def test_every_installed_model_for_pictures_is_known_by_its_file():
    models = pytest.importorskip("torchvision").models
    kinds = (models, models.detection, models.segmentation)
    every = [name for kind in kinds for name in models.list_models(module=kind)]
    assert sorted(torchvision_models()) == sorted(every)
    assert problem_of(model(f"torchvision:{every[0]}")) is None
    assert problem_of(model("torchvision:fasterrcnn_resnet50_fpn")) is None
    assert problem_of(model("torchvision:r3d_18")) is not None


def zipped(*names: str) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return into.getvalue()


def tarred() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return into.getvalue()


SAMPLES = {
    "checkpoint": zipped("net/data.pkl"),
    "safetensors": b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": {}}       ',
    "torchscript": zipped("net/constants.pkl", "net/data.pkl"),
    "export": zipped("net/archive_format"),
    "inductor": zipped("net/archive_format", "net/data/aotinductor/model/a.wrapper.so"),
    "onnx": b"\x08\x09\x3a\x10",
    "skops": zipped("schema.json", "1.npy"),
    "pickle": pickle.dumps({"a": 1}),
    "hdf5": b"\x89HDF\r\n\x1a\n",
    "keras": zipped("config.json", "model.weights.h5"),
    "tflite": b"\x1c\x00\x00\x00TFL3",
    "gguf": b"GGUF\x03",
    "engine": b"ftrt\x00",
    "mar": zipped("MAR-INF/MANIFEST.json"),
    "lfs": b"version https://git-lfs.github.com/spec/v1\n",
    "html": b"\n<html>",
    "xml": b"<?xml version='1.0'?>",
    "npy": b"\x93NUMPY\x01",
    "picture": b"\x89PNG\r\n",
    "tar": tarred(),
    "cut": zipped("net/data.pkl")[:40],
    "zip": zipped("a.txt"),
    "compressed": b"\x1f\x8b\x08",
    "empty": b"",
}
BY_NAME = {"python": "net.py", "notebook": "net.ipynb", "onnx": "net.onnx", "pickle": "a.joblib"}


def test_every_kind_of_file_is_told_by_its_content_or_its_name(tmp_path: Path):
    path = tmp_path / "file"
    for kind, content in SAMPLES.items():
        path.write_bytes(content)
        assert kind_of(path) == kind
    path.write_bytes(zipped("version", "serialized_exported_program.json"))
    assert kind_of(path) == "export"
    for kind, name in BY_NAME.items():
        (tmp_path / name).write_text("text")
        assert kind_of(tmp_path / name) == kind
    assert KINDS.keys() == SAMPLES.keys() | BY_NAME.keys()
