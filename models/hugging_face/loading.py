"""Loads a network and its picture processor from a folder. Runs in worker processes only.

Nothing is fetched, no code of the folder's runs, and only safetensors are read, unless the options
say so. transformers takes seconds to import, so that is done as late as possible.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import CheckpointError, InputError, ModelError, SourceError
from inferpool.models.files.checkpoint import first_line, read_weights
from inferpool.models.files.hugging_face import Task, architectures_of, no_picture_folder, task_of
from inferpool.models.files.opened import announce
from inferpool.models.vision.images import check_size
from inferpool.models.vision.pictures import check_stretch

logger = logging.getLogger(__name__)

_AUTO_CLASSES: Mapping[Task, str] = {
    "classification": "AutoModelForImageClassification",
    "detection": "AutoModelForObjectDetection",
    "segmentation": "AutoModelForSemanticSegmentation",
}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FETCHED = ["*.json", "*.safetensors"]
_SHOWN = 3
_MOST_USUAL = 16
"""Proportions of pictures that each processor should know how to prepare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """Permissions and weights that the options of the settings give."""

    weights: str | None
    """ "DEFAULT" for the folder's, a checkpoint's path, or None for random weights."""
    trust_remote_code: bool
    """Code that lies in the folder may run."""
    pickled_weights: bool
    """Weights may be read from `pytorch_model.bin`, as tensors alone."""


class TransformersNetwork(nn.Module):
    """A network of transformers that returns tensors alone: logits, and boxes if it has them."""

    def __init__(self, inner: nn.Module, *, has_boxes: bool) -> None:
        super().__init__()
        self.inner = inner
        self._has_boxes = has_boxes

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Any:
        """Compute a batch of processed pictures, with masks of the pixels that count."""
        given = {} if mask is None else {"pixel_mask": mask}
        found = self.inner(pixel_values=pixels, **given)
        return (found.logits, found.pred_boxes) if self._has_boxes else found.logits


class PictureFolder:
    """A folder with `config.json`, a picture processor, and weights.

    Args:
        path: The folder.
        options: What is allowed.

    Raises:
        SourceError: There is no network in it that can be served.
    """

    def __init__(self, path: Path, options: FolderOptions) -> None:
        if not path.is_dir():
            raise SourceError(f"there is no folder {path} (looked for from {Path.cwd()})")
        architecture = next((each for each in architectures_of(path) if task_of(each)), None)
        task = architecture and task_of(architecture)
        if not architecture or not task:
            raise SourceError(no_picture_folder(path))
        self.path = path
        self.architecture = architecture
        self.task: Task = task
        self._options = options
        self.processor: Any = None
        self._config: Any = None

    def open(self) -> Mapping[int, str]:
        """Read the processor; return the names of the classes by number.

        Raises:
            ModelError: transformers is not installed.
            SourceError: A file is missing, or cannot be read.
        """
        transformers = _imported(self.path)
        if not any((self.path / name).is_file() for name in _PROCESSOR_FILES):
            raise SourceError(
                f"{self.path} has no {_PROCESSOR_FILES[0]}, which says how pictures are prepared: "
                f'write it with `processor.save_pretrained("{self.path}")`'
            )
        self.processor = self._read(transformers.AutoImageProcessor.from_pretrained)
        self._config = self._read(transformers.AutoConfig.from_pretrained)
        if getattr(self._config, "use_pretrained_backbone", False):
            # The folder's weights have the backbone too. transformers 5.0 would fetch it first.
            self._config.use_pretrained_backbone = False
        return cast("Mapping[int, str]", self._config.id2label)

    def build_network(self) -> TransformersNetwork:
        """Build the network, with the weights of the folder unless the settings say otherwise.

        Raises:
            SourceError: It cannot be built.
            CheckpointError: The weights are missing, or are those of another network.
        """
        transformers = _imported(self.path)
        auto = getattr(transformers, _AUTO_CLASSES[self.task])
        weights = self._options.weights
        if weights == "DEFAULT":
            return self._wrapped(self._pretrained(auto))
        inner = self._read(
            lambda _, **given: auto.from_config(
                self._config, trust_remote_code=given["trust_remote_code"]
            )
        )
        if weights is not None:  # transformers renames tensors of older files
            found = read_weights(weights, inner)
            inner = self._loaded(
                lambda _, **given: type(inner).from_pretrained(
                    None, config=self._config, state_dict=found, **given
                ),
                weights,
            )
        return self._wrapped(inner)

    def _wrapped(self, inner: nn.Module) -> TransformersNetwork:
        return TransformersNetwork(inner, has_boxes=self.task == "detection")

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse a picture that the processor would make much too large.

        Raises:
            InputError: It is refused.
        """
        edge = _edge(self.processor, "shortest_edge")
        if edge and not _edge(self.processor, "longest_edge"):
            if self.task != "classification":
                check_stretch(size)
            short, long = sorted(size)
            check_size(edge, edge * long // short)

    def prepared(self, picture: Image.Image) -> dict[str, Tensor]:
        """Prepare a client's picture; see `features_of`.

        Raises:
            InputError: The processor cannot prepare it, since an edge would have no pixels.
        """
        try:
            return self.features_of(picture)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            if lacks_resources(error) or max(picture.size) <= _MOST_USUAL * min(picture.size):
                raise
            raise InputError(
                f"the image of {picture.width} x {picture.height} pixels cannot be prepared for "
                f"this network: {first_line(error)}"
            ) from error

    def features_of(self, picture: Image.Image) -> dict[str, Tensor]:
        """Prepare a picture: `pixels` [C, h, w], its own `size`, and a `mask` of pixels if any."""
        found = self.processor(images=picture, return_tensors="pt")
        size = torch.tensor([picture.height, picture.width])
        features = {"pixels": found["pixel_values"][0], "size": size}
        if "pixel_mask" in found:
            features["mask"] = found["pixel_mask"][0]
        return features

    @property
    def is_multi_label(self) -> bool:
        """True if a picture may have several classes, each with a probability of its own."""
        return getattr(self._config, "problem_type", "") == "multi_label_classification"

    def log_found(self) -> None:
        """Log what was found in the folder."""
        weights, labels = self._options.weights, self._config.id2label
        names = [labels[number] for number in sorted(labels)]
        logger.info(
            "%s: %s of transformers %s, with %s; %d classes: %s%s",
            self.path,
            self.architecture,
            _imported(self.path).__version__,
            "the folder's weights" if weights == "DEFAULT" else weights or "random weights",
            len(names),
            ", ".join(names[:_SHOWN]),
            ", …" if len(names) > _SHOWN else "",
        )

    def _pretrained(self, auto: Any) -> nn.Module:
        is_safe = any((self.path / name).is_file() for name in _SAFE)
        has_pickle = any((self.path / name).is_file() for name in _PICKLED)
        if not is_safe and not (has_pickle and self._options.pickled_weights):
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
            auto.from_pretrained, self.path, config=self._config, use_safetensors=is_safe
        )

    def _loaded(self, load: Any, origin: Path | str, **options: object) -> nn.Module:
        """Load a network with weights, and check that these are all that it needs.

        Raises:
            CheckpointError: They are not.
        """
        inner, info = self._read(
            load,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are among those that lack
            dtype=torch.float32,
            **options,
        )
        found = (*info["missing_keys"], *info["mismatched_keys"])
        lacking = sorted(each if isinstance(each, str) else str(each[0]) for each in found)
        if lacking:
            more = " and more" if len(lacking) > _SHOWN else ""
            names = ", ".join(lacking[:_SHOWN]) + more
            raise CheckpointError(
                f"the weights in {origin} are not those of {self.architecture}: they lack "
                f"{names}, or have other shapes there"
            )
        return cast("nn.Module", inner)

    def _read(self, read: Any, **options: object) -> Any:
        trusts = self._options.trust_remote_code
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


def _edge(processor: Any, name: str) -> int | None:
    """Return a length that a processor resizes to; None if it has none of this name."""
    size = getattr(processor, "size", None)
    found = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
    return found if isinstance(found, int) and getattr(processor, "do_resize", True) else None


def fetched(name: str, options: FolderOptions) -> Path:
    """Fetch a repository from the Hub of Hugging Face into its cache; return its folder.

    Args:
        name: Its name.
        options: What is allowed: pickled weights and code are fetched only then.

    Raises:
        ModelError: It cannot be fetched.
    """
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
