"""Says what kind of file a path is, by its first bytes, and what to do with it. No torch."""

import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from inferpool.models.attached import attached

CHECKPOINT_SUFFIXES = (".pth", ".pt", ".safetensors", ".safetensors.index.json")
_HEAD_BYTES = 512
_OLD_EXPORT = "serialized_exported_program.json"
"""A file in the archives that `torch.export.save` wrote before torch 2.8, which it still reads."""
ARCHIVE_MANIFEST = "MAR-INF/MANIFEST.json"
"""The file that marks an archive of TorchServe, and a folder that is one."""
_RECIPES = "docs/recipes.md has an example"
WholeKind = Literal["torchscript", "export", "onnx", "skops", "mar"]
"""Kinds of files that are whole models."""
_WHOLE: dict[str, WholeKind] = {
    ".pt2": "export", ".onnx": "onnx", ".skops": "skops", ".mar": "mar",
}  # fmt: skip
"""Kinds by the names of files; all others are TorchScript."""


_CLASS = f"write a class that loads it, and give package.module:Class as the source; {_RECIPES}"
_AGAIN = "copy or download the file itself"
_NAMED = "give the network as the source (torchvision:NAME, package.module:Class), and this file as"
KINDS = {
    "checkpoint": (
        "a file that holds weights or pickled objects, not a whole model",
        f"{_NAMED} --weights",
    ),
    "safetensors": ("a file of weights (safetensors)", f"{_NAMED} --weights"),
    "torchscript": ("a TorchScript archive", "give it a name that ends in .pt or .torchscript"),
    "export": ("a torch.export archive", "give it a name that ends in .pt2"),
    "inductor": ("a package of AOTInductor", "give it a name that ends in .pt2"),
    "onnx": ("an ONNX file", "give it a name that ends in .onnx"),
    "skops": ("a file of skops, with an estimator of scikit-learn", "name it so: .skops"),
    "pickle": (
        "a pickle of Python objects, such as pickle and joblib write",
        f"{_CLASS}. To load it runs code in it",
    ),
    "hdf5": ("an HDF5 file, such as Keras writes", _CLASS),
    "keras": ("a Keras archive", _CLASS),
    "tflite": ("a TensorFlow Lite file", _CLASS),
    "gguf": ("a GGUF file of llama.cpp", "this server does not generate texts"),
    "engine": ("a TensorRT engine", _CLASS),
    "mar": ("an archive of TorchServe", "give it a name that ends in .mar"),
    "lfs": ("a pointer of Git LFS, not the file itself", "run `git lfs pull` where it lies"),
    "html": ("a page of HTML, perhaps that of a failed download", _AGAIN),
    "xml": ("an XML file, perhaps the error of a failed download", _AGAIN),
    "npy": ("a file of numpy arrays", "a source is a model; inputs go to `inferpool predict`"),
    "picture": ("a picture", "a source is a model; inputs go to `inferpool predict`"),
    "tar": ("a tar archive", "unpack it, and give what is in it"),
    "cut": ("an archive that is damaged or cut short", _AGAIN),
    "zip": ("a zip archive, and no model of torch's", "unpack it, and give what is in it"),
    "compressed": ("a compressed file", "uncompress it, and give what is in it"),
    "python": ("a file of Python", "give the class in it as the source: package.module:Class"),
    "notebook": ("a notebook", "put the class into a .py file, and give module:Class"),
    "empty": ("an empty file", _AGAIN),
}
"""The name of each kind, with its article, and what to do with such a file."""
_MAGICS = (
    (0, rb"version https://git-lfs", "lfs"),
    (0, rb"\s*(<!--.*?-->\s*)*(?i:<!doctype html|<html)", "html"),
    (0, rb"\s*<\?xml", "xml"),
    (0, rb"\x89HDF\r\n\x1a\n", "hdf5"),
    (0, rb"GGUF", "gguf"),
    (4, rb"TFL3", "tflite"),
    (0, rb"ftrt|ptrt", "engine"),
    (0, rb"\x93NUMPY", "npy"),
    (0, rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP", "picture"),
    (257, rb"ustar", "tar"),
    (0, rb"\x1f\x8b|BZh|\xfd7zXZ\x00|\x28\xb5\x2f\xfd", "compressed"),
    (5, rb'\x00\x00\x00\{\s*"', "safetensors"),
    (0, rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", "checkpoint"),  # torch before 1.6
    (0, rb"\x80[\x02-\x05]", "pickle"),
    (0, rb"\x08[\x01-\x14][\x12\x1a\x22\x28\x32\x3a\x42]", "onnx"),  # fields of its ModelProto
)
"""The place and the bytes of each kind; the first that fits counts."""
_SUFFIXES = {
    ".onnx": "onnx", ".pkl": "pickle", ".pickle": "pickle", ".joblib": "pickle", ".h5": "hdf5",
    ".hdf5": "hdf5", ".keras": "keras", ".tflite": "tflite", ".gguf": "gguf", ".engine": "engine",
    ".plan": "engine", ".mar": "mar", ".html": "html", ".py": "python", ".ipynb": "notebook",
    ".pth": "checkpoint", ".ckpt": "checkpoint", ".safetensors": "safetensors",
}  # fmt: skip
"""Kinds by the names of files, for content that does not say more."""


def _sentence(path: Path, kind: str) -> str:
    called, advice = KINDS[kind]
    return f"{path} is {called}: {advice}"


def _archive_kind_of(members: Sequence[str]) -> str:
    """Distinguish the archives that torch writes by the names of the files inside."""
    names = {name.partition("/")[2] for name in members}
    if any(name.startswith("data/aotinductor/") for name in names):
        return "inductor"
    if "archive_format" in names or _OLD_EXPORT in members:
        return "export"
    if "constants.pkl" in names:
        return "torchscript"
    return "checkpoint" if "data.pkl" in names else "other"


def kind_of(path: Path) -> str | None:
    """Return the kind of a file, a key of `KINDS`; None if it is not there or not known."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return None
    if not head:
        return "empty"
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    for place, pattern, kind in _MAGICS:
        if re.match(pattern, head[place:], re.DOTALL):
            return kind
    return _SUFFIXES.get(path.suffix.lower())


def what_it_is(path: Path) -> str:
    """Return a sentence about a file that is no source as it is; empty if there is nothing to say.

    A folder gets one too if others than us write such folders.
    """
    if kind := kind_of(path):
        return _sentence(path, kind)
    if os.path.isfile(path / "saved_model.pb"):  # never raises, for any text
        return f"{path} is a SavedModel of TensorFlow: {_CLASS}"
    if os.path.isfile(path / "config.json"):
        return f"{attached('fault of transformers')(path)}. For any other, {_CLASS}"
    return ""


def is_checkpoint_path(weights: str) -> bool:
    """Return whether weights are named by a path, not by a word that their source knows."""
    return weights.endswith(CHECKPOINT_SUFFIXES) or "/" in weights


def problem_of_file(path: Path, wanted: WholeKind) -> str:
    """Return why a file is not a whole model of a kind; empty if it may be one."""
    kind = kind_of(path)
    if kind == wanted:
        return ""
    if kind is None or kind == "cut":
        called = KINDS[wanted][0] if wanted in ("onnx", "skops", "mar") else "an archive of torch's"
        return f"{path} is not {called}, or is cut short"
    return _sentence(path, kind)


def is_package(path: Path) -> bool:
    """Return whether a file is a package of AOTInductor."""
    return kind_of(path) == "inductor"


def problem_of_source(path: Path) -> str:
    """Return why a file is not what its name says; empty if it may be that."""
    wanted = _WHOLE.get(path.suffix, "torchscript")
    fits = wanted == "export" and is_package(path)
    return "" if fits else problem_of_file(path, wanted)


def problem_of_weights(path: Path) -> str:
    """Return why a file cannot hold weights, as far as its first bytes say; empty if it may."""
    kind = kind_of(path)
    if kind == "empty":
        return f"{path} is not a checkpoint: the file is empty"
    if kind in ("torchscript", "export", "inductor"):
        called = {"torchscript": "TorchScript", "export": "torch.export"}.get(kind, "AOTInductor")
        return f"{path} is a {called} archive, a whole model: name it as the source, not as weights"
    if path.suffix == ".safetensors":
        return "" if kind in (None, "safetensors") else _sentence(path, kind)
    if kind == "safetensors":
        return f"{path} holds safetensors: give it a name that ends in .safetensors"
    return "" if kind in (None, "cut", "checkpoint", "pickle", "tar") else _sentence(path, kind)


def _kind_of_zip(path: Path) -> str:
    if not zipfile.is_zipfile(path):
        return "cut"
    names = _members(path)
    if ARCHIVE_MANIFEST in names:
        return "mar"
    if (kind := _archive_kind_of(names)) != "other":
        return kind
    if "schema.json" in names:
        return "skops"
    if "model.weights.h5" in names:
        return "keras"
    return "npy" if names and all(name.endswith(".npy") for name in names) else "zip"


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []


def archive_of(source: str) -> Path | None:
    """Return the path of the archive of TorchServe that a source names; None if it names none."""
    prefix, _, name = source.partition(":")
    if prefix == "torchserve" and name:
        return Path(name)
    path = Path(source)
    return path if source.endswith(".mar") or os.path.isfile(path / ARCHIVE_MANIFEST) else None


def is_served(path: Path) -> bool:
    """Return whether a folder has a model that is served: in Hugging Face's form, or an archive."""
    # Without any of these files it has no form, and what finds the form need not be imported.
    names = ("config.json", "modules.json", ARCHIVE_MANIFEST)
    is_there = any(os.path.isfile(path / name) for name in names)
    return is_there and attached("form of a folder")(path) is not None
