"""Classes that Python code hands over, as worker processes find them."""

import linecache
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from inferpool.models.errors import SourceError
from inferpool.service.embedded.source import source_of, text_of
from tests.e2e.running import ROOT
from tests.small_classifier import SmallClassifier

_CELLS = [
    """
import functools as ft
import math
from collections.abc import Mapping
from inferpool.models.base import Model as Base
FACTOR, NAMES = 2, {"a": [1, 2.5, None]}
unused = object()
""",
    """
class Offset:
    def value(self):
        return len(NAMES)
""",
    """
def scaled(x: Mapping) -> float:
    unused = FACTOR * math.sqrt(x)
    return unused + Offset().value()
""",
    """
@ft.total_ordering
class Net(Base):
    def forward(self, batch):
        return [scaled(each) for each in batch]
    def __lt__(self, other):
        return False
""",
    "handle = open('/dev/null')",
    """
class Holder(Base):
    def forward(self, batch):
        return handle.read()
""",
]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The main module of a kernel that has run `_CELLS`, which it keeps as IPython does."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    for number, text in enumerate(_CELLS):
        name = f"/tmp/ipykernel_1/{number}.py"
        lines = text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        exec(compile(text, name, "exec"), vars(module))
    yield module
    module.handle.close()


def test_class_of_a_module_is_imported_from_there():
    assert source_of(SmallClassifier).source == "tests.small_classifier:SmallClassifier"


def test_a_typed_in_class_brings_what_it_uses(notebook: ModuleType):
    found = source_of(notebook.Net)
    assert found.source == "typed_net:Net"
    again: dict[str, object] = {"__name__": "typed_net"}
    exec(found.text, again)
    net = again["Net"]
    assert isinstance(net, type)
    assert net().forward([4, 9]) == [5.0, 7.0]
    assert "unused" not in again


def test_a_class_without_all_its_source_is_refused(notebook: ModuleType):
    with pytest.raises(SourceError, match=r"Holder uses handle, a TextIOWrapper.*into a file"):
        source_of(notebook.Holder)
    exec("class Gone(Base):\n    def forward(self, batch): ...", vars(notebook))
    with pytest.raises(
        SourceError, match=r"the source of Gone is not known, .* stdin: put it into a file"
    ):
        text_of(notebook.Gone)


def test_a_class_that_cannot_be_imported_is_refused():
    class LocalClass:
        pass

    with pytest.raises(SourceError, match="inside of a function"):
        source_of(LocalClass)
    made = type("Made", (), {})
    with pytest.raises(SourceError, match=r"Made is not what tests\.\S+ has"):
        source_of(made)


@pytest.mark.parametrize(
    ("start", "name", "said"),
    [
        (["nets/script.py"], "script.py", "script:Net {folder}"),
        (["-m", "nets.script"], "script.py", "nets.script:Net"),
        (["-m", "nets"], "__main__.py", "nets.__main__:Net"),
    ],
)
def test_class_of_what_is_run_is_imported_from_there(
    tmp_path: Path, start: list[str], name: str, said: str
):
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / name).write_text(
        "from inferpool.service.embedded.source import source_of\n"
        "class Net: ...\n"
        "found = source_of(Net)\n"
        "print(found.source, found.folder)\n"
    )
    shown = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert shown == said.format(folder=folder)
