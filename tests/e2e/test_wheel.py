"""The wheel, installed beside a project whose packages are named like our folders."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.e2e.running import ROOT, running

MODEL = """
from inferpool import Features, Model, Placement, TensorSpec
from service import FACTOR
from workers import OFFSET


class Line(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 2))]
    outputs = [TensorSpec(name="y", dtype="float32", shape=(-1, 2))]

    def load(self, placement: Placement) -> None:
        pass

    def forward(self, features: Features) -> Features:
        return {"y": FACTOR * features["x"] + OFFSET}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with the wheel and its dependencies."""
    uv = shutil.which("uv")  # takes a second, pip ten
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=uv is None)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = str(home / "bin" / "python")
    pip = [uv, "pip"] if uv else [python, "-m", "pip"]
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install, *(["--python", python] if uv else [])], check=True)
    return home / "bin"


@pytest.fixture(params=["packages", "namespaces"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a user's project, with or without an `__init__.py` in each of its packages."""
    if request.param == "packages":
        files = {"models": "", "service": "FACTOR = 3", "workers": "OFFSET = 1"}
        files = {f"{name}/__init__.py": text for name, text in files.items()}
        model = MODEL
    else:
        files = {"service/factor.py": "FACTOR = 3", "workers/offset.py": "OFFSET = 1"}
        model = MODEL.replace("service import", "service.factor import")
        model = model.replace("workers import", "workers.offset import")
    for name, text in {**files, "models/line.py": model}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_it_installs_one_package(wheel: Path):
    names = ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"inferpool"}
    ours = {
        path.as_posix()
        for top in ("service", "workers", "models")
        for path in (ROOT / top).rglob("*.py")
    }
    assert {f"inferpool/{Path(path).relative_to(ROOT)}" for path in ours} <= set(names)
    assert {"inferpool/service/parts/live/files/index.html", "inferpool/py.typed"} <= set(names)
    assert any(name.endswith("photos/chelsea.jpg") for name in names)


@pytest.mark.slow
def test_a_class_is_served_from_a_users_own_package_models(installed: Path, project: Path):
    command = [str(installed / "inferpool")]
    arguments = ["models.line:Line", "--replicas", "1"]
    with running(*arguments, command=command, cwd=project, env={"PYTHONPATH": ""}) as service:
        assert service.predict([1, 2]) == [[4.0, 7.0]]


@pytest.mark.slow
@pytest.mark.parametrize("project", ["packages"], indirect=True)
def test_a_script_serves_a_class_of_its_own_package_models(installed: Path, project: Path):
    (project / "ask.py").write_text(
        "import inferpool\n"
        "from models.line import Line\n"
        "with inferpool.serve(Line, replicas=1, speed='exact') as service:\n"
        "    print(service.client.predict([1, 2]).value)\n"
    )
    done = subprocess.run(
        [str(installed / "python"), "ask.py"], cwd=project, env={"PATH": ""},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "[4.0, 7.0]\n", done.stderr


@pytest.mark.parametrize("name", ["service", "workers", "models"])
def test_a_folder_of_the_clone_is_imported_by_its_new_name_alone(name: str):
    done = python(["-c", f"import {name}"])
    assert done.returncode == 1
    assert f"ImportError: write `inferpool.{name}` to import this." in done.stderr


def python(arguments: Sequence[str], cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def without_links(tmp_path: Path) -> Path:
    """Return a checkout by tools that write links as text files."""
    (tmp_path / "inferpool").mkdir()
    for path in [*ROOT.glob("*.*"), *(ROOT / "inferpool").glob("*.*"), ROOT / "LICENSE"]:
        if path.is_file():
            (tmp_path / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    for name in ("service", "workers", "models"):
        (tmp_path / "inferpool" / name).write_text(f"../{name}")
    return tmp_path


def test_checkout_without_links_builds_no_wheel(without_links: Path):
    built = python(["-m", "hatchling", "build", "--target", "wheel"], without_links)
    assert built.returncode != 0
    assert "core.symlinks=true" in built.stderr
    assert not list(without_links.rglob("*.whl"))


def test_checkout_without_links_says_so_when_it_is_used(without_links: Path):
    for arguments in (["-c", "from inferpool import Client"], ["-m", "inferpool", "version"]):
        done = python(arguments, without_links)
        assert done.returncode == 1
        assert "inferpool/service is missing" in done.stderr
        assert "core.symlinks=true" in done.stderr


def test_a_name_that_needs_a_missing_package_says_which():
    blocked = "import sys; sys.modules['pydantic'] = None; import inferpool; inferpool.serve"
    done = python(["-c", blocked])
    assert "ModuleNotFoundError: serve needs pydantic, which is not installed" in done.stderr
