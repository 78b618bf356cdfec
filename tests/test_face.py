"""The public names in `inferpool/__init__.py`."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import inferpool
from inferpool.service.client import errors
from tests.e2e.running import ROOT

_SERVERS = {"torch", "numpy", "fastapi", "starlette", "uvicorn", "pydantic", "msgspec"}


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def in_order(names: list[str]) -> list[str]:
    """Sort names as ruff does: constants first."""
    return sorted(names, key=lambda name: (not name.isupper(), name))


def test_every_name_can_be_imported():
    for name in inferpool.__all__:
        found = getattr(inferpool, name)
        assert getattr(found, "__name__", name).rpartition(".")[2] == name or name == "Features"
        assert name in dir(inferpool)
    assert inferpool.__all__ == in_order(inferpool.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Modell'"):
        inferpool.Modell  # type: ignore[attr-defined]  # noqa: B018  # as a user may type it


def test_all_errors_of_the_client_can_be_imported():
    every = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert {name for name in every if name.endswith("Error")} <= {*inferpool.__all__}


def test_version_is_that_of_the_package():
    assert inferpool.__version__ == version("inferpool")


def test_type_checkers_and_the_interpreter_see_the_same_names():
    tree = ast.parse(Path(str(inferpool.__file__)).read_text())
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "importlib"
        for alias in node.names
    }
    assert told.pop("testing") == "inferpool"
    assert told == {name: f"inferpool.{place}" for name, place in inferpool._PLACE_OF.items()}
    assert in_order([*told, "testing"]) == inferpool.__all__


def test_client_imports_nothing_of_the_server():
    found = modules_after("from inferpool import Client, AsyncClient, Prediction, OverloadedError")
    assert "httpx" in found
    assert found & _SERVERS == set()


def test_the_package_alone_imports_nothing():
    assert {name for name in modules_after("import inferpool") if "inferpool" in name} == {
        "inferpool"
    }


def test_serving_from_python_needs_no_torch_here():
    assert "torch" not in modules_after("from inferpool import serve, asgi_app")
