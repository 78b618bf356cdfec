"""Finds models that certainly cannot be loaded, in milliseconds and without running any of them.

A worker needs torch, which takes seconds to import, before it can report the same. What only the
user's own code can tell, such as a class that its module gets from elsewhere, is left to the
worker.
"""

import ast
import difflib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import problem_of_archive, problem_of_weights
from inferpool.models.files.modules import (
    file_of,
    is_installed,
    nearest_modules,
    spec_of,
    with_parents,
)
from inferpool.models.files.run_folder import RunFolder, read_card
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import SettingsError, dotted, place_of
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.sources import (
    BUILT_IN_SOURCES,
    MODEL_FILE_SUFFIXES,
    is_run_source,
)

Problem = tuple[Literal["source", "weights"], str]
"""The setting that is wrong, and why."""
_WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors", ".safetensors.index.json")
_REGISTERED = re.compile(
    r'^@register_model\((?:name=)?"?(\w*)"?\)$.*?^def (\w+)', re.MULTILINE | re.DOTALL
)


def check_loadable(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse settings of which no model can be loaded. One that can be is worth a start.

    Raises:
        SettingsError: None can; the problems say why, and where each setting comes from.
    """
    if settings.cluster_port is not None:
        return  # the files are on other hosts
    problems = []
    for name, model in settings.models.items():
        problem = problem_of(model)
        if problem is None:
            return
        key = "models", name, problem[0]
        problems.append(f"{place_of(key, origins.get(dotted(key), 'default'))}: {problem[1]}")
    if problems:
        raise SettingsError(problems)


def problem_of(model: ModelSettings) -> Problem | None:
    """Return why a model certainly cannot be loaded, from the current folder."""
    source, weights = model.source, model.weights
    prefix, colon, name = source.partition(":")
    is_own = weights == "DEFAULT" or weights.lower() == "none"
    text, is_path = "", not is_own
    if source == "echo" or source.endswith(MODEL_FILE_SUFFIXES):
        text, is_path = "" if source == "echo" else _problem_of_archive(source), False
        if not (text or is_own):
            return "weights", f"{source} takes no weights, but was given {weights!r}"
    elif source in BUILT_IN_SOURCES:
        pass
    elif is_run_source(source):
        text = _problem_of_run(Path(source), has_weights=weights != "DEFAULT")
    elif prefix == "torchvision" and colon:
        text = _problem_of_torchvision(name)
        is_path = is_path and (weights.endswith(_WEIGHT_SUFFIXES) or "/" in weights)
    elif prefix == "encoder" and colon:
        if not Path(name).is_dir():
            text = f"there is no folder {name} (looked for from {Path.cwd()})"
    elif colon:
        text = _problem_of_module(prefix)
        is_path = is_path and not text and _is_plain_network(prefix, name)
    if text:
        return "source", text
    if is_path and (text := _problem_of_weights(weights)):
        return "weights", text
    return None


def _problem_of_run(path: Path, *, has_weights: bool) -> str:
    try:
        read_card(path)
    except SourceError as error:
        return str(error)
    run = RunFolder(path)
    needed = [run.labels] if has_weights else [run.labels, run.weights]
    return next((f"{file}: there is no such file" for file in needed if not file.is_file()), "")


def _problem_of_archive(source: str) -> str:
    path = Path(source)
    if not path.is_file():
        return f"there is no file {source} (looked for from {Path.cwd()})"
    wanted: Literal["export", "torchscript"] = "export" if path.suffix == ".pt2" else "torchscript"
    return _unread(path) or problem_of_archive(path, wanted)


def _problem_of_weights(weights: str) -> str:
    path = Path(weights)
    if path.is_dir():
        return f"{weights}: this is a folder, not a file of weights"
    if not path.is_file():
        return f"{weights}: there is no such file (looked for from {Path.cwd()})"
    return _unread(path) or problem_of_weights(path)


def _unread(path: Path) -> str:
    try:
        path.open("rb").close()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _problem_of_torchvision(name: str) -> str:
    spec = importlib.util.find_spec("torchvision")
    file = file_of("torchvision.models", [os.getcwd(), *sys.path])
    if spec is None:
        return "torchvision is not installed: `pip install torchvision`, of torch's version"
    names = [] if file is None or not is_installed(file) else list(_classifiers(file.parent))
    if not names or name in names:
        return ""
    near = difflib.get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(names))}"
    return f"torchvision has no classifier {name!r}: {hint}"


def _classifiers(folder: Path) -> Iterator[str]:
    """Yield the names of the builders that the files of `torchvision.models` register."""
    for file in folder.glob("*.py"):
        text = file.read_text("utf-8", errors="replace")
        for found in _REGISTERED.finditer(text):
            yield found[1] or found[2]


def _problem_of_module(module: str) -> str:
    if module.endswith(".py") and Path(module).is_file():
        named = module.removesuffix(".py").replace("/", ".")
        return f"a module is named without .py: {named}:CLASS"
    places = [os.getcwd(), *sys.path]
    top = module.partition(".")[0]
    try:
        is_there = spec_of(top, places) or importlib.util.find_spec(top)
    except (ImportError, ValueError):  # an odd name, or a module without a spec
        return ""
    if not is_there:
        hint = nearest_modules(top, Path.cwd())
        return f"there is no module {top!r}: it must be installed, or lie under {Path.cwd()}{hint}"
    for name in with_parents(module):
        spec = spec_of(name, places)
        if spec is not None and spec.origin is None:
            continue  # a folder without __init__.py, which runs nothing
        file = file_of(name, places)
        if file is None or is_installed(file):
            return ""
        try:
            body = _body_of(file)
        except SyntaxError as error:
            text = f"{type(error).__name__}: {error.msg}"
            return f"module {name!r} fails on import: {text} ({file}:{error.lineno})"
        except (OSError, ValueError, RecursionError):
            return ""
        if any(not isinstance(node, ast.Expr) for node in body):
            return ""  # a package's own code may decide how its modules are found
    return ""


def _body_of(file: Path) -> list[ast.stmt]:
    """Return the statements of a file that Python can compile.

    Raises:
        SyntaxError: It cannot.
    """
    with warnings.catch_warnings(action="ignore"):  # the worker shows them
        tree = ast.parse(file.read_bytes(), str(file))
        compile(tree, str(file), "exec", dont_inherit=True)
    return tree.body


def _is_plain_network(module: str, name: str) -> bool:
    """Return whether a module defines a class as an `nn.Module`, whose weights are a checkpoint."""
    file = file_of(module, [os.getcwd(), *sys.path])
    try:
        body = _body_of(file) if file else []
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    torch_names = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.nn"))
        for alias in node.names
    }
    bases = [
        [ast.unparse(base) for base in node.bases]
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == name and not node.decorator_list
    ]
    (only,) = bases if len(bases) == 1 else ([],)
    allowed = {"nn.Module": "nn", "torch.nn.Module": "torch", "Module": "Module"}
    return len(only) == 1 and allowed.get(only[0]) in torch_names
