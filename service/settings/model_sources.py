"""Sources of models: their forms, hints for a text that is not one, and what sources import.

The forkserver imports some packages early. A user's own modules are read and never imported: their
code may do anything, and may change between two incarnations of a worker. An early import must
change neither which code a worker runs nor what that code sees. So only installed packages are
imported early, and none if a user's file may change the environment or the search for modules.
"""

import ast
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from inferpool.models.attached import (
    BUILT_IN_SOURCES,
    MODEL_FILE_SUFFIXES,
    WEIGHT_FILE_SUFFIXES,
    attached,
    modules_of,
)
from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import archive_of, is_served, what_it_is
from inferpool.models.files.modules import (
    file_of,
    is_installed,
    is_standard,
    places_from,
    with_parents,
)
from inferpool.models.files.run_folder import has_begun, is_run, read_card, why_no_run

DEFAULT_SOURCE = "efficientnet_lite0"
_FILE_SUFFIXES = (*MODEL_FILE_SUFFIXES, *WEIGHT_FILE_SUFFIXES, ".toml", ".py")
"""Names that end so are files, and no folders of runs."""
_SOURCE_FORMS = (
    f"{', '.join(BUILT_IN_SOURCES)}, torchvision:NAME, encoder:FOLDER, reranker:FOLDER, "
    "package.module:Class, the folder of a training run, of transformers or of TorchServe, or a "
    f"{', '.join(MODEL_FILE_SUFFIXES[:-1])} or {MODEL_FILE_SUFFIXES[-1]} file"
)
_REGISTERED = re.compile(
    r'^@register_model\((?:name=)?"?(\w*)"?\)$.*?^def (\w+)', re.MULTILINE | re.DOTALL
)
"""A builder that a file of `torchvision.models` registers, by a name of its own or by that of the
function."""
_TORCHVISION_FOLDERS = ("", "detection/", "segmentation/")
_KNOWN = frozenset(
    ("torchvision", "torchaudio", "timm", "transformers", "diffusers", "sentence_transformers")
)
"""Packages that take seconds to import and do nothing else meanwhile. The forkserver checks that
they have started no thread and opened no GPU."""
_OF_TEXTS = ("encoder", "reranker")
"""Beginnings of sources that name a folder, which may need the package transformers."""
_MAX_FILES = 50
"""Files to read for one source. With more, the rest is unknown."""
_OURS = "inferpool"
_TELLING = {
    "os": frozenset(("environ", "environb", "putenv", "unsetenv", "*")),
    "sys": frozenset(("path", "modules", "meta_path", "path_hooks", "*")),
}
"""Names of these modules that let a file change what a later import finds or sees."""
_TELLING_MODULES = frozenset(("dotenv", "site"))


def is_source(text: str) -> bool:
    """Return whether a text has the form of a source, which may not exist."""
    if text in BUILT_IN_SOURCES or text.endswith(MODEL_FILE_SUFFIXES):
        return True
    kind, colon, name = text.partition(":")
    return bool(kind and colon and name) or is_run_source(text) or is_served(Path(text))


def is_run_source(text: str) -> bool:
    """Return whether a source is the folder of a training run: it is there, or has a slash."""
    if is_run(Path(text)):
        return text not in BUILT_IN_SOURCES
    if "/" not in text or ":" in text or text.endswith(_FILE_SUFFIXES):
        return False
    return not os.path.isfile(text) and not is_served(Path(text))


def slug(source: str) -> str:
    """Return a name fit for URLs: "torchvision:resnet18" gives "resnet18".

    An archive of TorchServe has a name of its own.
    """
    own = attached("name of an archive")(source) if archive_of(source) else None
    last = re.split(r"[:/\\]", (own or source).rstrip("/"))[-1].lower()
    for suffix in MODEL_FILE_SUFFIXES:
        last = last.removesuffix(suffix)
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")[:64] or "model"


def source_hint(text: str, candidates: Sequence[str]) -> str:
    """Return a hint about a text that was meant as a source, with the nearest of the candidates."""
    if text.endswith(".toml"):
        return f"this is a file of settings: use --config {text}"
    if has_begun(Path(text)):
        return why_no_run(Path(text))
    if known := what_it_is(Path(text)):
        return known
    if text.endswith(WEIGHT_FILE_SUFFIXES):
        return (
            "this is a file of weights: give the network as the source, and this file as --weights"
        )
    if os.path.isfile(text):
        return f"{text} is a file of an unknown kind: a source is {_SOURCE_FORMS}"
    if text.lower() in torchvision_models():
        near = did_you_mean(text, candidates).removeprefix("did you mean ")
        return f"did you mean torchvision:{text.lower()}{' or ' + near.rstrip() if near else '?'}"
    return f"{did_you_mean(text, candidates)}a source is {_SOURCE_FORMS}"


def torchvision_models() -> list[str]:
    """Return the models of torchvision for pictures by its files: its import would take seconds."""
    file = file_of("torchvision.models", places_from(os.getcwd()))
    if file is None or not is_installed(file):
        return []
    files = [each for folder in _TORCHVISION_FOLDERS for each in file.parent.glob(f"{folder}*.py")]
    texts = [each.read_text("utf-8", errors="replace") for each in files]
    return [found[1] or found[2] for text in texts for found in _REGISTERED.finditer(text)]


def did_you_mean(text: str, candidates: Sequence[str]) -> str:
    """Return a question that names the nearest candidate, and a space; empty if none is near."""
    near = next(iter(difflib.get_close_matches(text, candidates, n=1)), None)
    return f"did you mean {near}? " if near else ""


def modules_to_preload(sources: Sequence[str], folder: Path) -> list[str]:
    """Return our modules and the packages that workers will import for some sources."""
    return [*modules_of(sources), *packages_to_preload(sources, folder)]


def packages_to_preload(sources: Sequence[str], folder: Path) -> list[str]:
    """Return what the models of some sources will import, as "module" or "module:attribute".

    All workers come from one forkserver, so one source that rules out early imports does so for
    all.

    Args:
        sources: The sources, as the settings name them.
        folder: The folder where modules are looked for first.
    """
    places = [str(folder), *sys.path]
    found: dict[str, None] = {}
    for source in sources:
        name, colon, path = _network_of(source, folder).partition(":")
        if name in _OF_TEXTS or (not colon and is_served(folder / name)):
            is_needed = attached("need of transformers")(folder / (path if colon else name))
            found |= dict.fromkeys(["transformers"] if is_needed else [])
        elif name in _KNOWN:
            found[name] = None
        elif colon:
            imported = _imported_by(name, places)
            if imported is None:
                return []
            found.update(dict.fromkeys(imported))
    return [each for each in found if _is_installed(each.partition(":")[0], places)]


def _network_of(source: str, folder: Path) -> str:
    """Return the source of the network of a training run; any other source as it is."""
    if not is_run_source(source):
        return source
    try:
        return read_card(folder / source).model
    except SourceError:
        return ""  # the worker will report it


def _is_installed(module: str, places: Sequence[str]) -> bool:
    """Return whether the first package of that name is an installed one, not the user's own."""
    file = file_of(module.partition(".")[0], places)
    return file is not None and is_installed(file)


def _imported_by(name: str, places: Sequence[str]) -> list[str] | None:
    """Return the known packages that a module imports, itself or through the user's other modules.

    None if one of the files may change what an import finds or sees, or if there are too many
    files.
    """
    found: list[str] = []
    waiting = with_parents(name)
    seen = set(waiting)
    num_files = 0
    while waiting:
        name = waiting.pop(0)
        file = file_of(name, places)
        if file is None or is_installed(file) or is_standard(file):
            continue
        num_files += 1
        nodes = _nodes_of(file)
        if num_files > _MAX_FILES or any(_is_telling(node) for node in nodes):
            return None
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for module, attribute in _imports(nodes, package):
            if module.partition(".")[0] in _KNOWN:
                found.append(f"{module}:{attribute}" if attribute else module)
                continue
            for each in with_parents(f"{module}.{attribute}" if attribute else module):
                if each not in seen and each.partition(".")[0] != _OURS:
                    seen.add(each)
                    waiting.append(each)
    return found


def _nodes_of(file: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the worker will report it


def _is_telling(node: ast.AST) -> bool:
    """Return whether a node may change the environment or the search for modules."""
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr=name):
            return name in _TELLING["sys"]
        case ast.Attribute(attr=name):
            return name in _TELLING["os"]
        case ast.Import(names=names):
            return any(
                each.name.partition(".")[0] in _TELLING_MODULES
                or (each.name in _TELLING and each.asname not in (None, each.name))
                for each in names
            )
        case ast.ImportFrom(module=str(module), names=names, level=0):
            is_any = module.partition(".")[0] in _TELLING_MODULES
            return is_any or any(each.name in _TELLING.get(module, ()) for each in names)
    return False


def _imports(nodes: Sequence[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    """Yield each module that a file imports, with the imported attribute or an empty string."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield module, "" if alias.name == "*" else alias.name
