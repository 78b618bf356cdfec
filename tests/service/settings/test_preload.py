"""Finds what models import by reading; nothing of theirs is run."""

from pathlib import Path

import pytest

from inferpool.service.settings.preload import modules_to_preload


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are installed, with nothing in them."""
    folder = tmp_path / "lib" / "site-packages"
    write(folder, timm="", transformers="", torchvision="")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("echo", []),
        ("torchvision:resnet18", ["torchvision"]),
        ("encoder:some/folder", []),
        ("tests_nowhere:Net", []),
        ("broken_module:Net", []),
        ("plain_nets:Net", ["torchvision.models.detection", "transformers:AutoModel"]),
        ("pack.nets:Net", ["torchvision", "torchvision:transforms"]),
    ],
)
def test_known_packages_are_found_in_what_a_source_imports(
    tmp_path: Path, source: str, found: list[str]
):
    write(
        tmp_path,
        broken_module="import torchvision as\n",
        plain_nets="raise SystemExit('never run')\nimport os, json, pydantic\n"
        "from inferpool.models.base import Model\nimport torchvision.models.detection as d\n"
        "def load():\n    from transformers import AutoModel\n",
        pack__in____init__="",
        pack__in__nets="from . import layers\nfrom .deep.more import x\nimport pack.nets\n",
        pack__in__layers="import torchvision\n",
        pack__in__deep__in____init__="",
        pack__in__deep__in__more="from torchvision import transforms\n",
    )
    assert modules_to_preload([source, source], tmp_path) == found


def test_package_beside_the_model_is_left_to_the_worker(tmp_path: Path):
    write(tmp_path, net="import timm, torchvision\n", timm__in____init__="")
    assert modules_to_preload(["net:Net"], tmp_path) == ["torchvision"]


def test_package_that_is_not_installed_is_left_to_the_worker(tmp_path: Path):
    write(tmp_path, net="import sentence_transformers\n")
    assert modules_to_preload(["net:Net"], tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n",
        "import os\ndef late():\n    os.putenv('HF_HOME', 'x')\n",
        "from os import environ\n",
        "from os import *\n",
        "import os as system\n",
        "import sys\nsys.path.insert(0, 'vendored')\n",
        "import sys\nsys.modules['timm'] = None\n",
        "from sys import path\n",
        "from dotenv import load_dotenv\n",
    ],
)
@pytest.mark.parametrize("place", ["net", "pack__in____init__", "calendar"])
def test_nothing_is_preloaded_if_a_file_may_change_what_an_import_sees(
    tmp_path: Path, text: str, place: str
):
    write(tmp_path, net="", other="import timm\n")
    write(tmp_path, pack__in____init__="", pack__in__layers="import timm\n")
    write(tmp_path, **{place: f"{text}import timm\n"})
    write(tmp_path, net=(tmp_path / "net.py").read_text() + "import calendar, pack.layers\n")
    assert modules_to_preload(["other:Net"], tmp_path) == ["timm"]
    assert modules_to_preload(["other:Net", "net:Net"], tmp_path) == []


def test_nothing_is_preloaded_for_a_source_of_too_many_files_to_read(tmp_path: Path):
    names = [f"part{number}" for number in range(60)]
    write(tmp_path, net=f"import timm, {', '.join(names)}\n", **dict.fromkeys(names, ""))
    assert modules_to_preload(["net:Net"], tmp_path) == []
