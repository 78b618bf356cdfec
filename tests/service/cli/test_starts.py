"""Each command imports only what it needs."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from inferpool.service.cli.verbs import VERBS

_TORCH = ("torch", "torchvision", "inferpool.models.base")
_SERVER = ("fastapi", "starlette", "uvicorn", "inferpool.service.app", "inferpool.service.api.web")
_SETTINGS = ("pydantic", "inferpool.service.settings.settings")
_CLIENT = "inferpool.service.client.calls"
_CLIENTS = ("httpx", _CLIENT)
_TOP = "inferpool.service.client.top.run"
_TOOLS = {
    name: f"inferpool.service.tools.{name}"
    for name in ("chaos", "doctor", "models", "place", "trial", "tune")
}
_FLAGS = (_TOOLS["trial"], f"{_TOOLS['trial']}.flags")
_NOT_BY_CODE = {
    "serve": (*_TORCH, *_CLIENTS, _TOP, *_TOOLS.values()),
    "agent": (*_TORCH, *_SERVER, *_CLIENTS, *_TOOLS.values(), "sqlalchemy"),
    "predict": (*_TORCH, *_SERVER, *_SETTINGS, *_TOOLS.values(), "numpy", "inferpool.workers"),
    "batch": (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, *_TOOLS.values(), "numpy"),
    "jobs": (*_TORCH, *_SERVER, *_SETTINGS, *_TOOLS.values(), "numpy", "inferpool.workers"),
    "train": (*_TORCH, *_SERVER, *_CLIENTS, "sqlalchemy"),
    "top": (*_TORCH, *_SERVER, *_SETTINGS, "numpy", "inferpool.workers", _CLIENT),
    "models": (*_TORCH, *_SERVER, "numpy", _CLIENT, _TOP, _TOOLS["tune"]),
    "place": (*_TORCH, *_SERVER, "numpy", _CLIENT, _TOP, _TOOLS["tune"], "ray"),
    "import": (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, *_TOOLS.values(), "numpy", "yaml"),
    "config": (*_TORCH, *_SERVER, *_CLIENTS, *_TOOLS.values(), "numpy", "asyncio", "rich"),
    "doctor": (*_TORCH, *_SERVER, *_CLIENTS, _TOOLS["chaos"], _TOOLS["tune"], _TOP),
    "tune": (*_TORCH, *_SERVER, _TOOLS["chaos"], _TOOLS["doctor"], _TOP),
    "chaos": (*_TORCH, *_SERVER, _TOOLS["tune"], _TOOLS["doctor"], _TOP),
    "version": (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, *_TOOLS.values(), "asyncio"),
}
_NOT_BY_HELP = (*_TORCH, *_SERVER, *_SETTINGS, *_CLIENTS, "asyncio", "msgspec", "numpy", "rich")


_AFTER_EACH = """
import os, sys
{base}
for code in {codes!r}:
    if not os.fork():
        told = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            exec(code)
        finally:
            os.write(told, (" ".join(sys.modules) + "\\n").encode())
            os._exit(0)
    os.wait()
"""


def loaded_by(codes: Mapping[str, str], base: str = "") -> dict[str, set[str]]:
    """Return the modules that a fresh interpreter has imported after each code.

    Each one has a process of its own, forked from one that has run the `base`.
    """
    program = _AFTER_EACH.format(base=base, codes=list(codes.values()))
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240
    )
    told = done.stdout.splitlines()
    return {key: set(line.split()) for key, line in zip(codes, told, strict=True)}


@pytest.fixture(scope="module")
def loaded_by_verbs() -> Mapping[str, set[str]]:
    """Return what the code of each verb has imported."""
    imports = {
        verb: "from {} import {}".format(*spec.code.split(":")) for verb, spec in VERBS.items()
    }
    imports["serve"] += "; import inferpool.service.app"
    imports["version"] += "; run(None)"
    slim = {verb: code for verb, code in imports.items() if _SETTINGS[0] in _NOT_BY_CODE[verb]}
    rest = {verb: code for verb, code in imports.items() if verb not in slim}
    return loaded_by(slim) | loaded_by(rest, base=f"import {_SETTINGS[1]}")


@pytest.fixture(scope="module")
def loaded_by_helps() -> Mapping[str, set[str]]:
    """Return what the help of each verb has imported, and that without a verb."""
    lines = {verb: [verb, "--help"] if verb else ["--help"] for verb in ("", *VERBS)}
    begin = "from inferpool.service.cli.main import run; run"
    return loaded_by({verb: f"{begin}({line})" for verb, line in lines.items()})


@pytest.mark.parametrize("verb", VERBS)
def test_verb_imports_nothing_of_the_others(verb: str, loaded_by_verbs: Mapping[str, set[str]]):
    loaded = loaded_by_verbs[verb]
    assert VERBS[verb].code.partition(":")[0] in loaded
    assert loaded.intersection(_NOT_BY_CODE[verb]) == set()


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_almost_nothing(verb: str, loaded_by_helps: Mapping[str, set[str]]):
    loaded = loaded_by_helps[verb]
    assert "inferpool.service.cli.verbs" in loaded
    assert loaded.intersection(_NOT_BY_HELP) == set()
    own = {_TOOLS[verb], f"{_TOOLS[verb]}.plan", *_FLAGS} if verb in _TOOLS else set()
    assert {each for each in loaded if each.startswith("inferpool.service.tools.")} <= own


def test_main_module_imports_nothing():
    loaded = loaded_by({"main": "import inferpool.__main__", "nothing": "pass"})
    assert loaded["main"] - loaded["nothing"] == {"inferpool", "inferpool.__main__"}


def test_workers_import_nothing_of_the_front_end():
    loaded = loaded_by({"preload": "import inferpool.workers.inside.preload"})["preload"]
    assert "torch" in loaded
    assert loaded.intersection({*_SERVER, *_SETTINGS, *_CLIENTS, "inferpool.service"}) == set()
