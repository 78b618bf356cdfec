"""Loads networks of the library transformers from folders. Runs in worker processes only.

Nothing is fetched, no code of the folder's runs, and only safetensors are read, unless the options
say so. transformers takes seconds to import, so that is done as late as possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import CheckpointError, ModelError, SourceError
from inferpool.models.files.checkpoint import first_line, read_weights
from inferpool.models.files.opened import announce

_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FETCHED = ["*.json", "*.safetensors"]
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """Permissions and weights that the options of the settings give."""

    weights: str | None
    """ "DEFAULT" for the folder's, a checkpoint's path, or None for random weights."""
    trust_remote_code: bool
    """Code that lies in the folder may run."""
    pickled_weights: bool
    """Weights may be read from `pytorch_model.bin`, as tensors alone."""

    def __post_init__(self) -> None:
        """Check that permissions are no texts: "false" would be true, too."""
        for name in ("trust_remote_code", "pickled_weights"):
            if not isinstance(given := getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, not {given!r}")


class NetworkFolder:
    """A folder with `config.json` and the weights of a network of transformers.

    Args:
        path: The folder.
        options: What is allowed.

    Raises:
        SourceError: There is no such folder.
    """

    def __init__(self, path: Path, options: FolderOptions) -> None:
        if not path.is_dir():
            raise SourceError(f"there is no folder {path} (looked for from {Path.cwd()})")
        self.path = path
        self.options = options

    @cached_property
    def library(self) -> Any:
        """The module transformers, which shows no progress and logs errors alone.

        Raises:
            ModelError: It is not installed.
        """
        return _imported(self.path)

    @cached_property
    def config(self) -> Any:
        """The network's configuration, an object of transformers.

        Raises:
            ModelError: transformers is not installed.
            SourceError: The file is missing, or cannot be read.
        """
        return self.read(self.library.AutoConfig.from_pretrained)

    def build(self, auto_class: str, *, unused: Sequence[str] = ()) -> nn.Module:
        """Build the network, with the weights of the folder unless the options say otherwise.

        Args:
            auto_class: Name of the class of transformers that makes it, such as "AutoModel".
            unused: Beginnings of the names of weights that may be missing, since no answer
                depends on them.

        Raises:
            SourceError: It cannot be built.
            CheckpointError: The weights are missing, or are those of another network.
        """
        auto = getattr(self.library, auto_class)
        weights = self.options.weights
        if weights == "DEFAULT":
            return self._pretrained(auto, unused)
        inner: Any = self.read(
            lambda _, **given: auto.from_config(
                self.config, trust_remote_code=given["trust_remote_code"]
            )
        )
        if weights is None:
            return cast("nn.Module", inner)
        found = read_weights(weights, inner)  # transformers renames tensors of older files
        return self._loaded(
            lambda _, **given: type(inner).from_pretrained(
                None, config=self.config, state_dict=found, **given
            ),
            weights,
            unused,
        )

    def _pretrained(self, auto: Any, unused: Sequence[str]) -> nn.Module:
        is_safe = any((self.path / name).is_file() for name in _SAFE)
        has_pickle = any((self.path / name).is_file() for name in _PICKLED)
        if not is_safe and not (has_pickle and self.options.pickled_weights):
            hint = (
                "its weights are pickled: convert them to safetensors, or set "
                "options.pickled_weights = true to have them read as tensors alone"
                if has_pickle
                else "give a file of them with --weights, or `--weights none` for random ones"
            )
            raise CheckpointError(f"{self.path} has no {_SAFE[0]}: {hint}")
        for file in self.path.glob("*.safetensors"):
            announce(file)
        return self._loaded(
            auto.from_pretrained, self.path, unused, config=self.config, use_safetensors=is_safe
        )

    def _loaded(
        self, load: Any, origin: Path | str, unused: Sequence[str], **options: object
    ) -> nn.Module:
        """Load a network with weights, and check that these are all that it needs.

        Raises:
            CheckpointError: They are not.
        """
        inner, info = self.read(
            load,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are among those that lack
            dtype=torch.float32,
            **options,
        )
        found = (*info["missing_keys"], *info["mismatched_keys"])
        names = (each if isinstance(each, str) else str(each[0]) for each in found)
        lacking = sorted(each for each in names if not each.startswith(tuple(unused)))
        if lacking:
            name = type(inner).__name__
            more = " and more" if len(lacking) > _SHOWN else ""
            raise CheckpointError(
                f"the weights in {origin} are not those of {name}: they lack "
                f"{', '.join(lacking[:_SHOWN])}{more}, or have other shapes there"
            )
        return cast("nn.Module", inner)

    def read(self, read: Any, **options: object) -> Any:
        """Call a function of transformers that reads the folder.

        Raises:
            SourceError: It failed.
        """
        trusts = self.options.trust_remote_code
        try:
            return read(
                str(self.path.absolute()),
                local_files_only=True,
                trust_remote_code=trusts,
                **options,
            )
        except Exception as error:  # damaged files make it raise almost anything
            if lacks_resources(error):
                raise
            hint = ""
            if not trusts and "trust_remote_code" in str(error):
                hint = ". Code in the folder runs only with options.trust_remote_code = true"
            raise SourceError(
                f"{self.path} cannot be read by transformers: {first_line(error)}{hint}"
            ) from error


def folder_at(name: str, options: FolderOptions, *, download: bool) -> Path:
    """Return a folder; with `download`, if there is none, that of a repository of the Hub.

    Args:
        name: The folder's path, or the repository's name.
        options: What is allowed: pickled weights and code are fetched only then.
        download: Whether to fetch the repository into the cache of Hugging Face.

    Raises:
        ModelError: It cannot be fetched.
    """
    if not download or Path(name).is_dir():
        return Path(name)
    patterns = [
        *_FETCHED,
        *(["*.bin"] if options.pickled_weights else ()),
        *(["*.py"] if options.trust_remote_code else ()),
    ]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=patterns))
    except ImportError as error:
        raise _missing(Path(name), error) from None
    except Exception as error:  # of HTTP, of files, of the name
        if lacks_resources(error):
            raise
        raise ModelError(f"{name} cannot be fetched from the Hub: {first_line(error)}") from error


def _imported(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise _missing(path, error) from None
    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    return transformers


def _missing(path: Path, error: ImportError) -> ModelError:
    return ModelError(
        f"{path} needs the package transformers, which cannot be imported ({error}): "
        "pip install 'inferpool[transformers]'"
    )


def some_names(names: Sequence[str]) -> str:
    """Return the first names, to show a person."""
    return f"{', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
