"""The wheels of the service and of its client, in environments without a clone of ours.

The service's is also installed beside a project whose packages are named like our folders.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from importlib import metadata
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


def built(source: Path, folder: Path) -> Path:
    """Build the wheel of a distribution."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.iterdir()
    return wheel


def made(home: Path, *wheels: Path) -> tuple[Path, Path]:
    """Make an environment with some wheels alone; return its `bin` and its packages."""
    uv = shutil.which("uv")  # takes a second, pip ten
    venv.create(home, with_pip=uv is None)
    python = str(home / "bin" / "python")
    pip = [uv, "pip"] if uv else [python, "-m", "pip"]
    install = ["install", "--quiet", "--no-deps", "--no-index", *map(str, wheels)]
    subprocess.run([*pip, *install, *(["--python", python] if uv else [])], check=True)
    return home / "bin", Path(sysconfig.get_path("purelib", vars={"base": str(home)}))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "service/client", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with both wheels and their dependencies."""
    bin, site = made(tmp_path_factory.mktemp("venv"), wheel, client_wheel)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return bin


@pytest.fixture(scope="module")
def client_alone(client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with the client's wheel and httpx alone."""
    bin, site = made(tmp_path_factory.mktemp("venv"), client_wheel)
    for package in needed_by("httpx"):
        files = metadata.files(package) or ()
        for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    return bin


def needed_by(package: str) -> set[str]:
    """Return the distributions that one needs without its extras, and itself."""
    found, todo = {package}, [package]
    while todo:
        needs = [each for each in metadata.requires(todo.pop()) or () if ";" not in each]
        names = {re.split(r"[^\w.-]", each)[0] for each in needs} - found
        found |= names
        todo += names
    return found


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
    assert not {"README.md", "LICENSE"} & {Path(name).name for name in names if "/client/" in name}
    assert any(name.endswith("photos/chelsea.jpg") for name in names)


def test_the_clients_wheel_has_the_same_files_under_its_own_name(client_wheel: Path):
    names = {name for name in ZipFile(client_wheel).namelist() if ".dist-info/" not in name}
    ours = (ROOT / "service/client").rglob("*.py")
    relative = {path.relative_to(ROOT / "service/client").as_posix() for path in ours}
    assert names == {f"inferpool_client/{name}" for name in {*relative, "py.typed"}}


def test_both_wheels_have_the_license(wheel: Path, client_wheel: Path):
    for each in (wheel, client_wheel):
        with ZipFile(each) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
            assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_both_distributions_have_one_version_and_need_the_same_packages():
    service, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in (".", "service/client")
    )
    assert client["version"] == service["version"]
    needed = client["dependencies"] + client["optional-dependencies"]["cli"]
    assert set(needed) <= set(service["dependencies"])


def asked(bin: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `inferpool-client`."""
    command = [str(bin / "inferpool-client"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=bin)


def test_the_client_works_where_nothing_but_httpx_is_installed(client_alone: Path):
    code = (
        "import importlib.util, inferpool_client\n"
        "from inferpool_client import *\n"
        "others = ['inferpool', 'torch', 'numpy', 'pydantic', 'msgspec', 'rich']\n"
        "assert not [each for each in others if importlib.util.find_spec(each)]\n"
        "with Client('http://127.0.0.1:9', retries=0) as client:\n"
        "    try:\n"
        "        client.predict([1, 2])\n"
        "    except ConnectError as error:\n"
        "        print(type(error).__module__)\n"
    )
    done = subprocess.run(
        [str(client_alone / "python"), "-c", code], capture_output=True, text=True, cwd=client_alone
    )
    assert (done.stdout, done.stderr) == ("inferpool_client.errors\n", "")
    nobody = ("--url", "http://127.0.0.1:9")
    jobs = asked(client_alone, "jobs", "show", "a-job", *nobody, "--key-file", "missing")
    assert jobs.stderr == "inferpool-client jobs: --key-file: missing: No such file or directory\n"
    for verb in (["models", "list"], ["top"]):
        done = asked(client_alone, *verb, *nobody)
        assert (done.returncode, done.stderr.count("service/client[cli]")) == (1, 1)
    for arguments in (["--help"], ["predict", "--help"], ["models", "swap", "--help"]):
        assert "inferpool-client" in asked(client_alone, *arguments).stdout


@pytest.mark.slow
def test_both_wheels_work_side_by_side(installed: Path, tmp_path: Path):
    code = "import inferpool, inferpool_client as c; print(inferpool.Client is c.Client)"
    done = subprocess.run(
        [str(installed / "python"), "-c", code], cwd=tmp_path, capture_output=True
    )
    assert done.stdout == b"False\n", done.stderr
    key = "a-key-for-administration"
    (tmp_path / "key").write_text(key)
    env = {
        "PYTHONPATH": "",
        "INFERPOOL_ADMIN_KEYS": key,
        "INFERPOOL_JOB_STORE": str(tmp_path / "store"),
    }
    command = [str(installed / "inferpool")]
    with running("echo", "--replicas", "1", command=command, cwd=tmp_path, env=env) as service:
        where = ("--url", service.url)
        predicted = asked(installed, "predict", "--text", "one", "--json", *where)
        assert json.loads(predicted.stdout)["predictions"] == ["one"], predicted.stderr
        (tmp_path / "in.jsonl").write_text('"a"\n')
        submitted = asked(installed, "jobs", "submit", f"{tmp_path}/in.jsonl", "--result", *where)
        assert submitted.returncode == 0, submitted.stderr
        assert json.loads(submitted.stdout)["prediction"] == "a"
        assert "echo ready" in asked(installed, "top", "--once", *where).stdout
        admin = (*where, "--key-file", str(tmp_path / "key"))
        swapped = asked(
            installed,
            "models",
            "swap",
            "echo",
            "--set",
            "policy=force",
            "--set",
            "credit=3",
            *admin,
        )
        assert swapped.stdout.startswith("echo: version 2 serves"), swapped.stderr
        refused = asked(installed, "models", "swap", "echo", "--set", "polcy=force", *admin)
        assert (refused.returncode, "did you mean policy?" in refused.stderr) == (2, True)


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
