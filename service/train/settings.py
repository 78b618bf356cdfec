"""The settings of `inferpool train`: a file, and flags over it."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import Field, ValidationError, field_validator

from inferpool.models.errors import DataError
from inferpool.models.files.run_folder import RunFolder
from inferpool.models.training.recipe import Augmentation, Precision
from inferpool.models.training.samples import share_of
from inferpool.service.settings.bounds import (
    Auto,
    Copies,
    Length,
    Ratio,
    Table,
    Text,
    Tries,
)
from inferpool.service.settings.draft import from_text, toml_value
from inferpool.service.settings.loader import read_table, write_toml
from inferpool.service.settings.model import SettingsTable
from inferpool.service.settings.model_sources import did_you_mean
from inferpool.service.settings.names import Key, SettingsError
from inferpool.service.settings.problems import expected, shown
from inferpool.workers.host.devices import parse_devices

YAML_SUFFIXES = (".yaml", ".yml")
_TABLES = ("options", "dataset_options")
"""Fields whose values the user names."""
_NO_PATHS = ("default", "none")
"""Values of `weights`, whatever files there are."""
_MAX_NODES = 1024
_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_RENDEZVOUS = re.compile(r"\[?[^\s/]+\]?:\d{1,5}")
_CLASS = re.compile(r"[\w.]+:\w+")
_UUIDS = ("GPU-", "MIG-")


class TrainSettings(SettingsTable):
    """The settings of a training run."""

    data: Text = ""
    """A folder with a subfolder of images for each label, or a .csv file with the columns path and
    label."""
    val: Text = Field("0.2", min_length=1)
    """Images to hold out, which judge the network: a share of each label's, such as 0.2, or another
    folder or .csv file."""
    dataset: Text = ""
    """A torch dataset of your own, instead of a folder: package.module:Class, which yields pairs of
    an image and the number of its class."""
    dataset_options: Table = Field(default_factory=dict)
    """Keyword arguments of your dataset."""
    output: Text = Field("run", min_length=1)
    """The folder of the run, which `inferpool serve` then serves."""
    model: Text = Field("torchvision:resnet18", min_length=1)
    """The network: torchvision:NAME, efficientnet_lite0, or package.module:Class of an nn.Module
    that takes `num_classes`."""
    weights: Text = Field("DEFAULT", min_length=1)
    """Weights to begin with: DEFAULT, a name that torchvision knows, a file, the folder of a run,
    or none for random ones."""
    options: Table = Field(default_factory=dict)
    """Keyword arguments of the network, besides the number of classes."""
    epochs: Auto | Length = "auto"
    """How many times each image is trained on. auto: by the number of images."""
    head_only_epochs: Auto | Tries = "auto"
    """The first epochs, which train only the last layer. auto: 1 if the network begins with
    weights, else 0."""
    batch_size: Auto | Length = "auto"
    """Images of one step, over all processes. auto: 32 to 256, by the number of images."""
    accumulate: Auto | Length = "auto"
    """Passes of each process for one step: the more, the less memory. auto: 1."""
    learning_rate: Auto | Ratio = "auto"
    """The highest rate; it rises in the warm-up, and then falls to 0 along half a cosine. auto: by
    the batch, and lower if the network begins with weights."""
    weight_decay: float = Field(0.05, ge=0, le=1e9, allow_inf_nan=False)
    """Decay of the weights (AdamW). Biases and norms have none."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """The share of the steps in which the rate rises."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """The share of each target that is spread over all labels."""
    ema_decay: Auto | Annotated[float, Field(ge=0, lt=1)] = "auto"
    """Decay of the moving average of the weights, per step; 0 for none. auto: by the steps."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of labels in the loss: balanced gives rare ones more."""
    augment: Auto | Augmentation = "auto"
    """Random changes of the images: none, shift (moved, turned and scaled a little), crop (a part),
    or crop and more by trivial, randaugment or autoaugment. auto: shift for gray images, digits and
    letters, else crop."""
    flip: Auto | bool = "auto"
    """Mirror images left to right at random. auto: not if they are gray, or if the labels are
    digits, letters or directions."""
    image_size: Auto | Annotated[int, Field(ge=16, le=2048)] = "auto"
    """Both edges of what the network sees, in pixels. auto: by the images and the network; small
    ones stay small."""
    freeze_norm: bool = False
    """Keep the statistics of batch norms as they were loaded."""
    sync_batchnorm: bool = False
    """Let batch norms use the statistics of all processes; on GPUs only."""
    precision: Auto | Precision = "auto"
    """fp32, or bf16 with weights of fp32. auto: bf16 on GPUs that have it, else fp32."""
    channels_last: Auto | bool = "auto"
    """Keep the channels of a pixel together in memory, which changes the speed alone. auto: on GPUs
    with bf16."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all that is random."""
    devices: Text = "auto"
    """Devices to train on: auto (every GPU, else the CPU), cpu, cuda, or GPUs such as cuda:0,1."""
    processes: Auto | Copies = "auto"
    """Processes of this host. auto: one for each GPU; 1 on the CPU."""
    threads: Auto | Copies = "auto"
    """Threads of torch in each process. auto: the cores divided by the processes."""
    workers: Auto | Annotated[int, Field(ge=0, le=64)] = "auto"
    """Processes that read images ahead, for each process that trains. auto: up to 8 for a GPU; 1 on
    the CPU, and 0 for few small images."""
    nodes: Text = "1"
    """Hosts that train together: a number, or MIN:MAX."""
    rdzv: Text = ""
    """HOST:PORT where several hosts meet: the name of one of them, the same for all."""
    rdzv_id: Text = "inferpool"
    """A name for the run, the same for all its hosts."""
    max_restarts: Tries = 5
    """How often the processes start again from the last checkpoint after one of them died."""
    checkpoint_minutes: Ratio = 5.0
    """Minutes between two checkpoints."""
    priority: Literal["idle", "normal"] = "idle"
    """idle: processes on the CPU take only cores that nobody else wants (Linux). normal: they have
    the same right to them as others."""
    tensorboard: bool = True
    """Write event files for TensorBoard, if tensorboardX is installed."""

    @field_validator("val", "nodes", mode="before")
    @classmethod
    def _take_number(cls, value: object) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if is_number else value

    @field_validator("val")
    @classmethod
    def _check_val(cls, val: str) -> str:
        try:
            share_of(val)
        except DataError:
            raise ValueError("is no share of the images; give one such as 0.2") from None
        return val

    @field_validator("dataset")
    @classmethod
    def _check_dataset(cls, dataset: str) -> str:
        if dataset and not _CLASS.fullmatch(dataset):
            raise ValueError("is not a class such as package.module:Class")
        return dataset

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: str) -> str:
        names = parse_devices(devices)
        if any(name.startswith(_UUIDS) for name in names):
            raise ValueError("names a GPU by its UUID; give its index, as nvidia-smi shows it")
        kinds = {name.partition(":")[0] for name in names}
        if len(kinds) > 1:
            raise ValueError("mixes devices of several kinds; a run has one kind")
        if len({*names}) < len(names) or (
            len(names) > 1 and not all(":" in each for each in names)
        ):
            raise ValueError("names a device twice")
        return devices

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: str) -> str:
        found = _NODES.fullmatch(nodes)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError("is neither a number of hosts nor MIN:MAX, such as 2:4")
        if int(found[2] or found[1]) > _MAX_NODES:
            raise ValueError(f"is more than {_MAX_NODES} hosts")
        return nodes

    @field_validator("rdzv")
    @classmethod
    def _check_rendezvous(cls, rdzv: str) -> str:
        if rdzv and not _RENDEZVOUS.fullmatch(rdzv):
            raise ValueError("is not HOST:PORT, such as trainer-0:29400")
        return rdzv

    @property
    def num_nodes(self) -> tuple[int, int]:
        """The least and the greatest number of hosts."""
        least, _, most = self.nodes.partition(":")
        return int(least), int(most or least)

    @property
    def has_weights(self) -> bool:
        """True if the network begins with weights: those of a user's class are unknown."""
        kind, _, name = self.model.partition(":")
        is_users = bool(name) and kind != "torchvision"
        return self.weights.lower() != "none" and not (is_users and self.weights == "DEFAULT")


def load_settings(args: Namespace) -> TrainSettings:
    """Load the settings from a file, if there is one, and from the flags, which override it.

    Args:
        args: The command line, parsed by `service.train.flags`. With `--resume` and without
            `--config`, the file is that of the run.

    Raises:
        SettingsError: A setting is unknown or invalid; each problem names its place.
    """
    table, file = _table_of(args)
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    problems = []
    for name, value in table.items():
        if name not in TrainSettings.model_fields:
            near = did_you_mean(name, [*TrainSettings.model_fields]).rstrip()
            hint = near or f"there are {', '.join(TrainSettings.model_fields)}"
            problems.append(f"{file}: {name}: there is no such setting; {hint}")
            continue
        # YAML 1.1 reads numbers such as 1e-3 as texts.
        is_text = isinstance(value, str) and file.endswith(YAML_SUFFIXES)
        values[name] = from_text(TrainSettings.model_fields[name], str(value)) if is_text else value
        places[name] = f"{file}: {name}"
    for name, field in TrainSettings.model_fields.items():
        given = getattr(args, name, None)
        if given is None:
            continue
        places[name] = "DATA" if name == "data" else f"--{name.replace('_', '-')}"
        if name in _TABLES:
            before = values.get(name)
            pairs, wrong = _pairs_in(given, places[name])
            problems.extend(wrong)
            values[name] = {**(before if isinstance(before, dict) else {}), **pairs}
        else:
            values[name] = from_text(field, given) if isinstance(given, str) else given
    settings: TrainSettings | None = None
    try:
        settings = TrainSettings.model_validate(values)
    except ValidationError as error:
        problems.extend(_explained(error, values, places))
    if settings is not None:
        problems.extend(_contradictions(settings))
    if settings is None or problems:
        raise SettingsError(problems)
    # An absolute path is still valid for a resumed run.
    return settings.model_copy(update={"weights": _absolute(settings.weights)})


def write_settings(settings: TrainSettings, stream: TextIO) -> None:
    """Write a file for `--config` that can be used from any folder."""
    paths = {each: _absolute(getattr(settings, each)) for each in ("data", "output")}
    if share_of(settings.val) is None:
        paths["val"] = _absolute(settings.val)
    rows: list[tuple[Key, object, str]] = [
        ((name,), paths.get(name, getattr(settings, name)), "default")
        for name in TrainSettings.model_fields
        if name not in _TABLES
    ]
    for table in _TABLES:
        options: Mapping[str, object] = getattr(settings, table)
        rows.extend(((table, name), value, "default") for name, value in options.items())
    write_toml(rows, stream)


def _absolute(path: str) -> str:
    """Return the absolute path of an existing file or folder, and any other text unchanged."""
    is_path = path and path.lower() not in _NO_PATHS and os.path.exists(path)
    return os.path.abspath(path) if is_path else path


def _table_of(args: Namespace) -> tuple[Mapping[str, object], str]:
    """Return the contents and the name of a file of settings; empty if there is none."""
    if args.config is not None:
        file, origin = Path(args.config), "--config"
    elif args.resume:
        output = args.output or TrainSettings.model_fields["output"].default
        file, origin = RunFolder(Path(output)).settings, "--resume"
    else:
        return {}, ""
    if file.suffix.lower() in YAML_SUFFIXES:
        return _yaml_of(file), str(file)
    return read_table(file, Path.cwd(), origin), str(file)


def _yaml_of(file: Path) -> Mapping[str, object]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise SettingsError(
            [f"--config: {file}: YAML needs pyyaml: pip install 'inferpool[train]'"]
        ) from None
    try:
        table = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError([f"--config: {file} cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([f"{file}: {' '.join(str(error).split())}"]) from None
    if table is None:
        return {}
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise SettingsError([f"{file}: it has no settings: write lines such as epochs: 10"])
    return table


def _pairs_in(texts: Sequence[str], flag: str) -> tuple[Mapping[str, object], Sequence[str]]:
    """Return the values of each KEY=VALUE, and the problems of invalid ones."""
    pairs = {}
    problems = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            problems.append(f"{flag}: {text!r} is not KEY=VALUE")
            continue
        pairs[key] = toml_value(value)
    return pairs, problems


def _explained(
    error: ValidationError, values: Mapping[str, object], places: Mapping[str, str]
) -> Iterator[str]:
    """Yield one line for each setting that cannot be used."""
    seen = set()
    for each in error.errors(include_url=False):
        name = str(each["loc"][0])
        if name in seen:
            continue  # a union reports each of its branches
        seen.add(name)
        raw = each.get("ctx", {}).get("error")
        right = str(raw) if raw else f"is not {expected(TrainSettings.model_fields[name])}"
        value = values.get(name, each["input"])
        place = places.get(name, f"--{name.replace('_', '-')}")
        yield f"{place}: {shown(value)} {right}"


def _contradictions(settings: TrainSettings) -> Iterator[str]:
    if not settings.data and not settings.dataset:
        yield (
            "there is nothing to train on: name a folder with a subfolder of images for each "
            "label, a .csv file, or a --dataset"
        )
    if settings.data and settings.dataset:
        yield f"--dataset: the images come from {settings.data}; name one of the two"
    if settings.nodes != "1" and not settings.rdzv:
        yield f"--nodes: {settings.nodes} hosts need --rdzv HOST:PORT, where they meet"
    if settings.dataset_options and not settings.dataset:
        yield "--dataset-options: there is no --dataset to take them"
    if settings.head_only_epochs not in ("auto", 0) and settings.weights.lower() == "none":
        yield (
            f"--head-only-epochs: {settings.head_only_epochs} epochs of the last layer alone need "
            "a network with weights, but --weights is none"
        )
    if (
        settings.epochs != "auto"
        and settings.head_only_epochs != "auto"
        and settings.head_only_epochs > settings.epochs
    ):
        yield (
            f"--head-only-epochs: {settings.head_only_epochs} are more than all "
            f"{settings.epochs} epochs"
        )
