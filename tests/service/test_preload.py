"""What models will import is found by reading, and nothing of theirs is run."""

from pathlib import Path

import pytest

from service.preload import modules_to_preload


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


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
        "import torchvision.models.detection as d\n"
        "def load():\n    from transformers import AutoModel\n",
        pack__in____init__="",
        pack__in__nets="from . import layers\nfrom .deep.more import x\nimport pack.nets\n",
        pack__in__layers="import torchvision\n",
        pack__in__deep__in____init__="",
        pack__in__deep__in__more="from torchvision import transforms\n",
    )
    assert modules_to_preload([source, source], tmp_path) == found
