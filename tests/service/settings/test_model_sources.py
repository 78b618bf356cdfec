from pathlib import Path

import pytest

from inferpool.models.attached import MODEL_FILE_SUFFIXES, WEIGHT_FILE_SUFFIXES
from inferpool.models.errors import ModelError
from inferpool.models.sources import registry
from inferpool.service.settings.model_sources import (
    is_run_source,
    is_source,
    packages_to_preload,
    slug,
    source_hint,
)
from tests.run_folders import TINY, write_run


def test_every_suffix_of_a_file_is_known():
    for suffix in MODEL_FILE_SUFFIXES:
        assert is_source(f"net{suffix}")
        assert slug(f"net{suffix}") == "net"
    for suffix in WEIGHT_FILE_SUFFIXES:
        assert not is_source(f"net{suffix}")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("efficientnet_lite0", "efficientnet_lite0"),
        ("torchvision:resnet18", "resnet18"),
        ("my.mod:MyNet", "mynet"),
        ("path/to/net.pt2", "net"),
        ("./Big Net.pt", "big-net"),
        ("mod:_Private", "private"),
        ("mod:___", "model"),
        ("mod:" + "x" * 100, "x" * 64),
        ("runs/Digits 2/", "digits-2"),
        ("/runs/12:30", "30"),
        ("./", "model"),
    ],
)
def test_the_name_of_a_source_is_fit_for_a_url(source, name):
    assert is_source(source)
    assert slug(source) == name


def test_a_folder_is_a_source_if_it_has_a_slash_or_is_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_source("run")
    write_run(tmp_path / "run", model=TINY)
    write_run(tmp_path / "12:30", model=TINY)
    assert is_source("run")
    assert is_run_source("run/")
    assert is_run_source("12:30")
    assert is_run_source("not/there")
    for text in ("torchvision:resnet18", "encoder:./run", "./net.pt2", "a/net.pth", "x/y.toml"):
        assert not is_run_source(text)
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(
        '{"architectures": ["ViTForImageClassification"]}'
    )
    (tmp_path / "mpnet").mkdir()
    (tmp_path / "mpnet" / "config.json").write_text(
        '{"architectures": ["MPNetForSequenceClassification"], "num_labels": 1}'
    )
    for source in ("mpnet", "./mpnet", "reranker:mpnet", "encoder:mpnet"):
        assert packages_to_preload([source], tmp_path) == ["transformers"]
    assert is_source("vit")
    assert not is_run_source("./vit")
    assert packages_to_preload(["vit", "./vit"], tmp_path) == ["transformers"]
    assert not is_source("x" * 5000)
    assert not is_source("a/net.pth")
    assert "folder of a training run" in source_hint("photos", [])
    (tmp_path / "run" / "card.json").unlink()
    assert not is_source("run")
    assert source_hint("run", []) == (
        "the run in run has not ended: `inferpool train --output run --resume` goes on with it"
    )
    assert "run has not ended" in str(registry_error("run/"))


def registry_error(source: str) -> ModelError:
    with pytest.raises(ModelError) as error:
        registry.build(source, "DEFAULT", {})
    return error.value


@pytest.fixture
def runs(tmp_path: Path) -> None:
    """Write the folders of runs, with the real torchvision."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/card.json").write_text("{")
    write_run(tmp_path / "run")
    write(tmp_path, net="import timm")
    write_run(tmp_path / "own", model="net:Net", weights={})


@pytest.mark.usefixtures("runs", "installed")
def test_what_the_network_of_a_run_imports_is_imported_early(tmp_path):
    for sources, found in (
        (["./run/"], ["torchvision"]),
        ([str(tmp_path / "run")], ["torchvision"]),
        (["./own"], ["timm"]),
        (["./broken", "not/there"], []),
    ):
        assert packages_to_preload(sources, tmp_path) == found


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install known packages, with nothing in them."""
    folder = tmp_path / "lib" / "site-packages"
    write(folder, timm="", transformers="", torchvision="")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("installed")
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
def test_known_packages_are_found_in_imports(tmp_path: Path, source: str, found: list[str]):
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
    assert packages_to_preload([source, source], tmp_path) == found


MANY = [f"part{number}" for number in range(60)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"net": "import timm, torchvision\n", "timm__in____init__": ""}, ["torchvision"]),
        ({"net": "import sentence_transformers\n"}, []),
        ({"net": f"import timm, {', '.join(MANY)}\n", **dict.fromkeys(MANY, "")}, []),
    ],
    ids=["package beside the model", "not installed", "too many files to read"],
)
def test_other_packages_are_left_to_the_worker(tmp_path: Path, files, found):
    write(tmp_path, **files)
    assert packages_to_preload(["net:Net"], tmp_path) == found


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
@pytest.mark.usefixtures("installed")
def test_files_that_may_change_imports_prevent_preloading(tmp_path: Path, text: str, place: str):
    write(tmp_path, net="", other="import timm\n")
    write(tmp_path, pack__in____init__="", pack__in__layers="import timm\n")
    write(tmp_path, **{place: f"{text}import timm\n"})
    write(tmp_path, net=(tmp_path / "net.py").read_text() + "import calendar, pack.layers\n")
    assert packages_to_preload(["other:Net"], tmp_path) == ["timm"]
    assert packages_to_preload(["other:Net", "net:Net"], tmp_path) == []
