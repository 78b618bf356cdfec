"""Each command imports only what it needs."""

import subprocess
import sys

import pytest

from inferpool.service.cli.verbs import VERBS

_TORCH = ("torch", "torchvision", "inferpool.models.base")
_SERVER = ("fastapi", "starlette", "uvicorn", "inferpool.service.app", "inferpool.service.api.web")
_SETTINGS = ("pydantic", "inferpool.service.settings.settings")
_CLIENT = "inferpool.service.client"
_CLIENTS = ("httpx", _CLIENT)
_TOOLS = {
    name: f"inferpool.service.tools.{name}"
    for name in ("chaos", "doctor", "models", "place", "top", "trial", "tune")
}
_FLAGS = (_TOOLS["trial"], f"{_TOOLS['trial']}.flags")
_NOT_BY_CODE = {
    "serve": (*_TORCH, *_CLIENTS, *_TOOLS.values()),
    "agent": (*_TORCH, *_SERVER, *_CLIENTS, *_TOOLS.values(), "sqlalchemy"),
    "predict": (*_TORCH, *_SERVER, *_SETTINGS, *_TOOLS.values(), "numpy", "inferpool.workers"),
    "batch": (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, *_TOOLS.values(), "numpy"),
    "jobs": (*_TORCH, *_SERVER, *_SETTINGS, *_TOOLS.values(), "numpy", "inferpool.workers"),
    "train": (*_TORCH, *_SERVER, *_CLIENTS, "sqlalchemy"),
    "top": (*_TORCH, *_SERVER, *_SETTINGS, "numpy", "inferpool.workers", _CLIENT),
    "models": (*_TORCH, *_SERVER, "numpy", _CLIENT, _TOOLS["top"], _TOOLS["tune"]),
    "place": (*_TORCH, *_SERVER, "numpy", _CLIENT, _TOOLS["top"], _TOOLS["tune"], "ray"),
    "config": (*_TORCH, *_SERVER, *_CLIENTS, *_TOOLS.values(), "numpy", "asyncio", "rich"),
    "doctor": (*_TORCH, *_SERVER, *_CLIENTS, _TOOLS["chaos"], _TOOLS["tune"], _TOOLS["top"]),
    "tune": (*_TORCH, *_SERVER, _TOOLS["chaos"], _TOOLS["doctor"], _TOOLS["top"]),
    "chaos": (*_TORCH, *_SERVER, _TOOLS["tune"], _TOOLS["doctor"], _TOOLS["top"]),
    "version": (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, *_TOOLS.values(), "asyncio"),
}
_NOT_BY_HELP = (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, "asyncio", "msgspec", "numpy", "rich")


def loaded_by(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has imported after some code."""
    tell = "finally:\n    print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", f"import sys\ntry:\n    {code}\n{tell}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return set(done.stderr.splitlines()[0].split())


@pytest.mark.parametrize("verb", VERBS)
def test_verb_imports_nothing_of_the_others(verb: str):
    module, _, function = VERBS[verb].code.partition(":")
    imports = f"from {module} import {function}"
    if verb == "serve":
        imports += "; import inferpool.service.app"
    loaded = loaded_by(imports)
    assert module in loaded
    assert loaded.intersection(_NOT_BY_CODE[verb]) == set()


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_almost_nothing(verb: str):
    line = [verb, "--help"] if verb else ["--help"]
    loaded = loaded_by(f"from inferpool.service.cli.main import run; run({line})")
    assert "inferpool.service.cli.verbs" in loaded
    assert loaded.intersection(_NOT_BY_HELP) == set()
    own = {_TOOLS[verb], f"{_TOOLS[verb]}.plan", *_FLAGS} if verb in _TOOLS else set()
    assert {each for each in loaded if each.startswith("inferpool.service.tools.")} <= own


def test_main_module_imports_nothing():
    loaded = loaded_by("import inferpool.__main__") - loaded_by("pass")
    assert loaded == {"inferpool", "inferpool.__main__"}


def test_start_imports_neither_torch_nor_a_client():
    assert not loaded_by("import inferpool.service.app") & {"torch", "httpx"}


def test_workers_import_nothing_of_the_front_end():
    loaded = loaded_by("import inferpool.workers.inside.preload")
    assert "torch" in loaded
    assert loaded.intersection({*_SERVER, *_SETTINGS, *_CLIENTS, "inferpool.service"}) == set()
