"""Scripts that serve their own models, imported for those by a worker."""

import sys
from pathlib import Path

import pytest

from inferpool.models.errors import SourceError
from inferpool.models.sources.importing import end_import_for_model, import_for_model

_CLASS = "class Doubler: pass\n"
_SERVE = "from inferpool.service.embedded.serve import serve\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"script_{abs(hash(request.node.nodeid))}"


def imported(name: str, folder: Path, text: str) -> dict[str, object]:
    (folder / f"{name}.py").write_text(text)
    try:
        return vars(import_for_model(name, "Doubler"))
    finally:
        sys.modules.pop(name, None)


def test_import_ends_where_the_script_would_serve(name: str, folder: Path):
    names = imported(name, folder, f"{_CLASS}{_SERVE}serve(Doubler)\nis_beyond = True")
    assert "Doubler" in names
    assert "is_beyond" not in names
    end_import_for_model()  # which does nothing afterwards


def test_import_ends_where_the_script_makes_an_application(name: str, folder: Path):
    make = "from inferpool.service.embedded.mounted import asgi_app\nasgi_app(Doubler)\n"
    names = imported(name, folder, f"{_CLASS}{make}is_beyond = True")
    assert "is_beyond" not in names


def test_application_may_be_made_before_its_class_is_defined(name: str, folder: Path):
    make = "from inferpool.service.embedded.mounted import asgi_app\nasgi_app('echo')\n"
    names = imported(name, folder, f"{make}{_CLASS}is_beyond = True")
    assert "is_beyond" in names


def test_executor_of_the_script_starts_no_service(name: str, folder: Path):
    text = f"""{_CLASS}{_SERVE}
import asyncio
async def main():
    await asyncio.get_running_loop().run_in_executor(None, lambda: serve(Doubler))
asyncio.run(main())
"""
    with pytest.raises(SourceError, match=f"import {name} .* under `if __name__ =="):
        imported(name, folder, text)


def test_script_that_serves_before_its_class_starts_no_service(name: str, folder: Path):
    with pytest.raises(SourceError, match="under `if __name__"):
        imported(name, folder, f"{_SERVE}serve('{name}:Doubler')\n{_CLASS}")
