"""Finds models that certainly cannot be loaded, in milliseconds and without running any of them.

A worker needs torch, which takes seconds to import, before it can report the same. What only the
user's own code can tell, such as a class that its module gets from elsewhere, is left to the
worker.
"""

import ast
import difflib
import importlib.util
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from inferpool.models.attached import BUILT_IN_SOURCES, MODEL_FILE_SUFFIXES, attached
from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import (
    archive_of,
    is_checkpoint_path,
    is_served,
    problem_of_source,
    problem_of_weights,
)
from inferpool.models.files.modules import (
    file_of,
    is_installed,
    named_right,
    nearest_modules,
    places_from,
    spec_of,
    with_parents,
)
from inferpool.models.files.run_folder import RunFolder, is_run, read_card
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.model_sources import is_run_source, torchvision_models
from inferpool.service.settings.names import SettingsError, dotted, place_of
from inferpool.service.settings.settings import Settings

Problem = tuple[Literal["source", "weights"], str]
"""The setting that is wrong, and why."""
_BEYOND = (OSError, ValueError, MemoryError, RecursionError)
"""Errors of what cannot be looked into, such as a file of too deep brackets: it is for the worker
to say whether it can."""


def check_loadable(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse settings that no model can be loaded from. One that can be is worth a start.

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
    try:
        return _problem_of(model)
    except _BEYOND:
        return None


def _problem_of(model: ModelSettings) -> Problem | None:
    source, weights = model.source, model.weights
    prefix, colon, name = source.partition(":")
    is_own = weights == "DEFAULT" or weights.lower() == "none"
    text, is_path = "", not is_own
    archive = archive_of(source)
    is_archive = source.endswith(MODEL_FILE_SUFFIXES) and not is_run(Path(source))
    if archive is not None:
        lost = _unread(archive, f"there is no file {archive}") if source.endswith(".mar") else ""
        text, is_path = lost or attached("fault of an archive")(archive), False
        if not (text or is_own):
            return "weights", f"{source} takes no weights, but was given {weights!r}"
    elif source == "echo" or is_archive:
        text, is_path = _problem_of_archive(source) if is_archive else "", False
        if not (text or is_own):
            return "weights", f"{source} takes no weights, but was given {weights!r}"
    elif source in BUILT_IN_SOURCES:
        pass
    elif is_run_source(source):
        text = _problem_of_run(Path(source), has_weights=weights != "DEFAULT")
    elif prefix == "torchvision" and colon:
        text = _problem_of_torchvision(name)
        is_path = is_path and is_checkpoint_path(weights)
    elif prefix == "encoder" and colon:
        text = _unread(Path(name), f"there is no folder {name}", is_folder=True)
    elif prefix in ("transformers", "reranker") and colon:
        is_path = is_path and is_checkpoint_path(weights)
        text = "" if model.options.get("download") is True else _problem_of_folder(prefix, name)
    elif is_served(Path(source)):
        is_path = is_path and is_checkpoint_path(weights)
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
    return _unread(path, f"there is no file {source}") or problem_of_source(path)


def _problem_of_folder(prefix: str, name: str) -> str:
    if lost := _unread(Path(name), f"there is no folder {name}", is_folder=True):
        return f"{lost}; to fetch it from the Hub of Hugging Face, set options.download = true"
    from inferpool.models.files.hugging_face import has_task, why_no_reranker, why_no_task

    path = Path(name)
    if prefix == "reranker":
        return why_no_reranker(path)
    return "" if has_task(path) else why_no_task(path)


def _problem_of_weights(weights: str) -> str:
    path = Path(weights)
    if os.path.isdir(path):
        return f"{weights}: this is a folder, not a file of weights"
    return _unread(path, f"{weights}: there is no such file") or problem_of_weights(path)


def _unread(path: Path, missing: str, *, is_folder: bool = False) -> str:
    """Return why a file or folder cannot be read, with the words for one that is not there."""
    lost = f"{missing} (looked for from {Path.cwd()})"
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
            return lost
        if not is_folder:
            path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return lost
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _problem_of_torchvision(name: str) -> str:
    importlib.invalidate_caches()
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed: `pip install torchvision`, of torch's version"
    names = torchvision_models()
    if not names or name in names:
        return ""
    near = difflib.get_close_matches(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(names))}"
    return f"torchvision has no classifier, detector or segmenter {name!r}: {hint}"


def _problem_of_module(module: str) -> str:
    if module.endswith(".py") and os.path.isfile(module):
        return f"a module is named without .py: {named_right(module)}:CLASS"
    importlib.invalidate_caches()  # folders may have come since the last look into them
    places = places_from(os.getcwd())
    top = module.partition(".")[0]
    try:
        is_there = top and (spec_of(top, places) or importlib.util.find_spec(top))
    except (ImportError, ValueError):  # an odd name, or a module without a spec
        return ""
    if not is_there:
        hint = nearest_modules(top, Path.cwd())
        if "/" in module and not module.startswith(("/", "..")):
            hint = f"; a module is named with dots: {named_right(module)}:CLASS"
        name = top or module
        return f"there is no module {name!r}: it must be installed, or lie under {Path.cwd()}{hint}"
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
            line = f":{error.lineno}" if error.lineno else ""
            return f"module {name!r} fails on import: {text} ({file}{line})"
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
    """Return whether a module defines an `nn.Module`; its weights are a checkpoint."""
    file = file_of(module, places_from(os.getcwd()))
    body = _body_of(file) if file else []
    torch_names = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if _full_name(node, alias.name) in ("torch", "torch.nn", "torch.nn.Module")
    }
    bases = [
        [ast.unparse(base) for base in node.bases]
        for node in body
        if isinstance(node, ast.ClassDef)
        and node.name == name
        and not (node.decorator_list or node.keywords)
    ]
    (only,) = bases if len(bases) == 1 else ([],)
    allowed = {"nn.Module": "nn", "torch.nn.Module": "torch", "Module": "Module"}
    return len(only) == 1 and allowed.get(only[0]) in torch_names and not _may_rebind(body, name)


def _full_name(node: ast.Import | ast.ImportFrom, name: str) -> str:
    return f"{node.module}.{name}" if isinstance(node, ast.ImportFrom) and not node.level else name


def _may_rebind(body: Sequence[ast.stmt], name: str) -> bool:
    """Return whether a module's name may mean something else than the class that it defines."""
    num_defined = 0
    for node in (each for statement in body for each in ast.walk(statement)):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found):
                num_defined += found == name
            case ast.Name(id=found, ctx=ast.Store()) if found == name:
                return True
            case ast.alias(name=found, asname=other) if name in (other, found) or found == "*":
                return True
            case ast.Name(id="globals" | "setattr" | "exec" | "vars"):
                return True
    return num_defined != 1
