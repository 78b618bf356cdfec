"""Makes the archives of the tests as torch-model-archiver writes them; the weights are made up.

`make_archives` has the real one make the same archives.
"""

import importlib.util
import itertools
import json
import random
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

SOURCES = Path(__file__).parent / "sources"
CREATED = "01/02/2026 03:04:05"
ARCHIVER = "0.12.0"
"""The version of torch-model-archiver that these archives are like."""


@dataclass(frozen=True)
class ArchiveRecipe:
    """The parts of an archive; files are below the folder of its sources."""

    handler: str
    model: str = ""
    """The model's name, if it is not the archive's."""
    version: str = "1.0"
    sources: str = ""
    """The folder of its sources, if it is not the archive's name."""
    model_file: str = ""
    serialized_file: str = ""
    config_file: str = ""
    extra_files: Sequence[str] = ()


RECIPES: Mapping[str, ArchiveRecipe] = {
    "classes": ArchiveRecipe(
        handler="image_classifier",
        model_file="model.py",
        serialized_file="weights.pth",
        extra_files=("index_to_name.json",),
    ),
    "classes_script": ArchiveRecipe(
        handler="image_classifier", sources="classes", serialized_file="script.pt"
    ),
    "segments": ArchiveRecipe(
        handler="image_segmenter", model_file="model.py", serialized_file="weights.pth"
    ),
    "boxes": ArchiveRecipe(
        handler="object_detector", model_file="model.py", extra_files=("index_to_name.json",)
    ),
    "words": ArchiveRecipe(
        handler="text_classifier",
        model_file="model.py",
        serialized_file="weights.pth",
        extra_files=("index_to_name.json", "source_vocab.pt"),
    ),
    "numbers": ArchiveRecipe(
        handler="numbers_handler.py",
        model_file="model.py",
        serialized_file="weights.pth",
        extra_files=("unit.json",),
    ),
    "plain": ArchiveRecipe(handler="plain:handle"),
    "plain_2": ArchiveRecipe(handler="plain:handle", model="plain", version="2.0"),
    "configured": ArchiveRecipe(handler="configured.py", config_file="model-config.yaml"),
    "pieces": ArchiveRecipe(handler="pieces.py"),
    "later": ArchiveRecipe(handler="later.py"),
    "raises": ArchiveRecipe(handler="raises.py"),
}
"""The archives by their files' names."""
AT_START = tuple(name for name in RECIPES if name not in ("later", "raises"))
"""Those that a server loads when it starts."""
BUILT_IN = ("image_classifier", "image_segmenter", "object_detector", "text_classifier")
GAIN = 3.0
"""The bound of the weights is so large that pictures get answers that differ."""
TEXT = (
    "the team wins the cup do not sell shares of the bank astronomers find a cafe on a new planet"
)
"""Texts of these words in this order are known; others are not."""


def write_archives(store: Path, scratch: Path, names: Iterable[str] = tuple(RECIPES)) -> None:
    """Write archives to a folder.

    Args:
        store: The folder of the archives.
        scratch: A folder for the files that go into them.
        names: Which archives.
    """
    for name in names:
        recipe, folder = RECIPES[name], write_sources(name, scratch)
        with zipfile.ZipFile(store / f"{name}.mar", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files_of(recipe):
                archive.write(folder / file, file)
            archive.writestr("MAR-INF/MANIFEST.json", manifest_of(name, recipe))


def write_store(folder: Path, archiver: Path | None = None) -> Path:
    """Write all archives to a folder of archives, and such as cannot be served; return it.

    `outside.mar` lies beside it: it must never be reached.

    Args:
        folder: The folder that this one is made in.
        archiver: The real torch-model-archiver, if it makes them.
    """
    store = folder / "store"
    store.mkdir()
    if archiver is None:
        write_archives(store, folder / "sources")
    else:
        make_archives(archiver, store, folder / "sources")
    (store / "broken.mar").write_bytes(b"this is no archive")
    shutil.copy(store / "later.mar", folder / "outside.mar")
    return store


def make_archives(archiver: Path, store: Path, scratch: Path) -> None:
    """Make all archives by the real torch-model-archiver, from the files in `scratch`."""
    for name, recipe in RECIPES.items():
        folder = write_sources(name, scratch)
        own = f"{handler_of(recipe)}.py" in files_of(recipe)
        named = {
            "--model-file": recipe.model_file,
            "--serialized-file": recipe.serialized_file,
            "--config-file": recipe.config_file,
        }
        command = [str(archiver), "--model-name", recipe.model or name]
        command += ["--version", recipe.version, "--export-path", str(scratch)]
        command += ["--handler", str(folder / recipe.handler) if own else recipe.handler]
        command += [x for flag, file in named.items() if file for x in (flag, str(folder / file))]
        if recipe.extra_files:
            files = ",".join(str(folder / each) for each in recipe.extra_files)
            command += ["--extra-files", files]
        subprocess.run([*command, "--force"], check=True)
        (scratch / f"{recipe.model or name}.mar").rename(store / f"{name}.mar")


def members_of(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the members of an archive with their kinds of packing, without times."""
    with zipfile.ZipFile(path) as archive:
        found = {
            each.filename: (each.compress_type, archive.read(each)) for each in archive.filelist
        }
    kind, text = found["MAR-INF/MANIFEST.json"]
    created = json.loads(text)["createdOn"]
    found["MAR-INF/MANIFEST.json"] = kind, text.replace(created.encode(), CREATED.encode())
    return found


def handler_of(recipe: ArchiveRecipe) -> str:
    """Return the name of the handler's module."""
    return recipe.handler.partition(":")[0].removesuffix(".py")


def files_of(recipe: ArchiveRecipe) -> list[str]:
    """Return the files that go into an archive, without the manifest."""
    handler = handler_of(recipe)
    own = [] if handler in BUILT_IN else [f"{handler}.py"]
    named = (recipe.model_file, recipe.serialized_file, recipe.config_file)
    return [*own, *(each for each in named if each), *recipe.extra_files]


def write_sources(name: str, scratch: Path) -> Path:
    """Write all files of an archive to a folder; return it."""
    recipe = RECIPES[name]
    sources, folder = SOURCES / (recipe.sources or name), scratch / name
    shutil.copytree(sources, folder, dirs_exist_ok=True)
    if recipe.serialized_file:
        network = _network(sources / "model.py", name)
        if recipe.serialized_file.endswith(".pth"):
            torch.save(network.state_dict(), folder / recipe.serialized_file)
        else:
            with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
                torch.jit.save(torch.jit.script(network), folder / recipe.serialized_file)
    if "source_vocab.pt" in recipe.extra_files:
        torch.save(vocabulary(), folder / "source_vocab.pt")
    return folder


def vocabulary() -> dict[str, int]:
    """Return the ids of words and of pairs of words that follow each other in `TEXT`."""
    words = TEXT.split()
    pairs = [" ".join(pair) for pair in itertools.pairwise(words)]
    return {token: place for place, token in enumerate(dict.fromkeys([*words, *pairs]))}


def _network(path: Path, name: str) -> nn.Module:
    """Return the network of a model file with weights that every version of PyTorch gives it."""
    spec = importlib.util.spec_from_file_location(f"archived_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # TorchScript reads the source by it
    spec.loader.exec_module(module)
    (made,) = (
        each for each in vars(module).values() if getattr(each, "__module__", "") == spec.name
    )
    network, numbers = made().eval(), random.Random(name.removesuffix("_script"))
    with torch.no_grad():
        for weight in network.parameters():
            bound = GAIN / weight[0].numel() ** 0.5 if weight.ndim > 1 else 0.1
            drawn = [numbers.uniform(-bound, bound) for _ in range(weight.numel())]
            weight.copy_(torch.tensor(drawn).view(weight.shape))
    assert isinstance(network, nn.Module)
    return network


def manifest_of(name: str, recipe: ArchiveRecipe) -> str:
    """Return the text of the manifest."""
    model = {
        "modelName": recipe.model or name,
        "serializedFile": recipe.serialized_file,
        "handler": recipe.handler,
        "modelFile": recipe.model_file,
        "modelVersion": recipe.version,
        "configFile": recipe.config_file,
    }
    manifest = {
        "createdOn": CREATED,
        "runtime": "python",
        "model": {key: value for key, value in model.items() if value},
        "archiverVersion": ARCHIVER,
    }
    return json.dumps(manifest, indent=2)
