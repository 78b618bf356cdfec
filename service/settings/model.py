"""The settings of one model, and the configuration that its workers get from them."""

import re
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from inferpool.models.attached import BUILT_IN_SOURCES, MODEL_FILE_SUFFIXES, attached
from inferpool.models.files.kinds import archive_of
from inferpool.models.spec import Interface, Placement, Split
from inferpool.models.speed_names import CHOICES
from inferpool.service.queue.batch_sizing import AUTO_SIZE
from inferpool.service.settings.bounds import (
    DAY_S,
    MAX_PROCESSES,
    Auto,
    Copies,
    Seconds,
    Table,
    Text,
    Tries,
)
from inferpool.service.settings.model_sources import (
    is_source,
    source_hint,
)
from inferpool.service.settings.paths import check_path
from inferpool.workers.host.devices import Host, parse_devices
from inferpool.workers.host.placing import PlacementRequest, place
from inferpool.workers.shared.config import CheckMode, ErrorDetail, ModelConfig, WorkerConfig

MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_OWN_CORES = 2
"""Cores of a worker for itself: for the thread that prepares, and the one that computes."""
_LEAST_CORES = 4
_MAX_DECODERS = 32


class SettingsTable(BaseModel):
    """The base of a table of settings: frozen, strict, each field with its docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class ModelSettings(SettingsTable):
    """The settings of one model: the table `[models.NAME]` of the file."""

    source: Text
    """`efficientnet_lite0`, `minilm_l6`, `echo`, `torchvision:NAME`, `encoder:FOLDER`,
    `reranker:FOLDER`, `transformers:FOLDER`, `package.module:Class`, the folder of a training run,
    of transformers or of sentence-transformers, or the path of a file: .pt2 (torch.export or
    AOTInductor), .onnx, .skops (scikit-learn), .mar (TorchServe), .pt, .ts or .torchscript
    (TorchScript). `torchserve:FOLDER` is an archive of TorchServe that was unpacked.

    A model whose name is that of a built-in source needs none."""
    path: Text | None = None
    """A path for calls besides `/predict/NAME`, such as `/classify`; an empty one for none. By
    default it is the one that the model's class has, if any."""
    envelope: bool | None = None
    """With `false` a JSON body is one instance as it stands, and the answer is the model's value,
    without `instances` and `predictions`. By default the model's class says it."""
    form: Literal["instances", "instance"] | None = None
    """The meaning of a form (`multipart/form-data`): `instances`, each of its files is one; or
    `instance`, all of it is one, as an object of its fields. By default the model's class says
    it."""
    accepts: Literal["", "image", "bytes"] | None = None
    """The meaning of a JSON string in the place of an instance: a picture (`image`) or `bytes` in
    base64; or a text, if this is empty. By default the model's class says it."""
    weights: Text = Field("DEFAULT", min_length=1)
    """`DEFAULT`, a weight that torchvision names, a .pth or .safetensors file, or `none`."""
    options: Table = Field(default_factory=dict)
    """Keyword arguments of your class, or of a built-in source."""
    replicas: Auto | Copies = "auto"
    """The number of loaded copies. `auto`: one per GPU; without a GPU, one per group of CPU cores,
    which all models share. A split model has one, or as many as `devices_per_replica` allows on the
    GPUs. In a cluster it is the number on each host."""
    devices: Text = "auto"
    """Devices of the replicas: `auto` (every GPU, else the CPU), `cpu`, `cuda`, GPUs such as
    `cuda:0,1`, UUIDs of GPUs or of MIG slices, or several of these separated by commas."""
    placement: Literal["replicate", "pipeline", "tensor"] = "replicate"
    """How a replica lies on devices: whole on one (`replicate`), in stages on several (`pipeline`),
    or with each large matrix divided over several (`tensor`)."""
    devices_per_replica: Auto | Copies = "auto"
    """The number of devices that a replica is split over, each with its own process. `auto`: the
    GPUs divided by `replicas`, or all of them if that is `auto`; 2 on CPUs."""
    share: float | None = Field(None, ge=0.001, le=1000)
    """The model's weight where several models are busy on one device: with `2.0` it gets twice the
    time of one with `1.0`, which is what a model without a share counts as. While the others are
    idle, it gets all. Without a GPU, models have cores of their own and share nothing, unless a
    share is set for one of them: then each has replicas on all cores, which takes more memory. Not
    for clusters."""
    gpu_memory_fraction: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    """The most of its GPU's memory that each process may allocate. `auto`: an equal share if
    several processes use a GPU, less what CUDA itself takes."""
    max_batch_size: Auto | Annotated[int, Field(ge=1, le=65536)] = "auto"
    """The most instances that one forward pass serves. `auto`: on accelerators 8 to 256, whichever
    serves the most per second; on CPUs 8, and up to 64 while a full batch takes about a
    millisecond, which only models that compute next to nothing do."""
    max_batch_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    """The most tokens of one forward pass of a model of texts; by default there is no bound. A text
    that has more goes alone. With it, `max_batch_size = "auto"` allows 256 texts."""
    batch_wait_ms: float = Field(0.0, ge=0, le=60_000, allow_inf_nan=False)
    """How long an idle worker waits for a batch to fill. 0: it starts with what is there."""
    objective_p99_ms: float | None = Field(None, gt=0, le=DAY_S * 1000, allow_inf_nan=False)
    """The time in which 99 of 100 instances should be answered, from their arrival; what would be
    late is refused with 429. Batches are kept small enough for it. By default there is none."""
    batch_timeout_s: Auto | Seconds = "auto"
    """A batch that runs for longer counts as a hang: its worker is killed and replaced. Waits for
    other batches of a pipeline don't count. `auto`: ten times the longest batch of the warm-up, at
    least 10 s; without a warm-up, 60 s."""
    stream_gap_s: Seconds = 60.0
    """A stream ends with an error if no part of it comes for this long."""
    max_stream_s: Auto | Seconds = "auto"
    """The most seconds of a stream, from its first part on. `auto`: the service's
    `max_timeout_s`."""
    max_stream_parts: int = Field(100_000, ge=1, le=1_000_000_000)
    """The most parts of a stream; one that has more ends with an error."""
    load_timeout_s: Seconds = 600.0
    """A worker that has not become ready by then is killed and started again."""
    credit: int = Field(2, ge=1, le=64)
    """Batches that a worker may hold at once: one that runs, the rest in preparation. A pipeline
    runs one for each stage (four at most), and holds more for that; a worker with decoders holds
    one more. On an accelerator, a worker whose model runs ahead holds two more, unless this is
    1."""
    check: CheckMode = "on"
    """The check of the model on its own example, before its first worker is ready: `on`, `warn` or
    `off`. `on`: a model that fails on it, gives NaN, or answers otherwise again or beside another
    instance is refused; `warn`: that is only logged, and shown in `/health`; `off`: nothing is
    checked."""
    max_restarts: Tries = 5
    """A worker that has never been ready is given up after this many restarts in a row."""
    threads_per_replica: Auto | Copies = "auto"
    """Threads that torch uses in each replica, or in each process of a split one. `auto`: an equal
    share of the cores that the model has."""
    speed: Text = "auto"
    """`exact` serves the network as it is; `auto` uses the fastest preset whose answers agree
    with that. Or name a preset: `channels_last`, `folded`, `bf16`, `fp16`, `compiled`,
    `compiled_bf16`; for GPUs `compiled_fp16`, `tf32`, `graphed`, `graphed_tf32`, `graphed_bf16`,
    `graphed_fp16`. A split model is always served exactly."""
    decode: Literal["auto", "exact", "fast"] = "auto"
    """How encoded images become pixels: `exact` as the model's authors did it; `fast` decodes large
    JPEGs smaller and rounds differently, or decodes plain JPEGs on the device; `auto` is fast if
    that agrees with exact (and exact if `speed` is)."""
    prepare_threads: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"
    """Threads that decode and resize in each worker; `auto`: 1 on a CPU, up to 8 for a GPU."""
    decoders: Auto | Annotated[int, Field(ge=0, le=64)] = "auto"
    """Processes that decode and resize for each worker, if its model allows it: the built-in image
    classifiers do. 0: the threads do it. `auto`: 0 on a CPU; for a GPU one per core that its worker
    has, less two, if it has four."""

    @model_validator(mode="before")
    @classmethod
    def _add_of_archive(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        source = values.get("source")
        if not isinstance(source, str) or archive_of(source) is None:
            return values
        return {**attached("settings of an archive")(source), **values}

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if not is_source(source):
            raise ValueError(f"is not a source; {source_hint(source, BUILT_IN_SOURCES)}")
        return source

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        return None if path is None else check_path(path)

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: str) -> str:
        parse_devices(devices)
        return devices

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, placement: str, info: ValidationInfo) -> str:
        source = str(info.data.get("source"))
        is_whole = source.endswith(MODEL_FILE_SUFFIXES) or archive_of(source) is not None
        if placement != "replicate" and (source == "echo" or is_whole):
            why = "has no network" if source == "echo" else "is an exported whole"
            raise ValueError(
                f'is not for {source}, which {why}: set "replicate", or serve a '
                "network from its class or from torchvision"
            )
        return placement

    @field_validator("devices_per_replica")
    @classmethod
    def _check_num_devices(cls, num: Auto | int, info: ValidationInfo) -> Auto | int:
        placement = info.data.get("placement", "replicate")
        if num == "auto" or (num == 1) == (placement == "replicate"):
            return num
        if num == 1:
            raise ValueError(
                f'is too few to split a model over: set 2 or more, or placement = "replicate" '
                f'instead of "{placement}"'
            )
        raise ValueError(
            'needs a split model: set placement = "pipeline" or "tensor" too; for several whole '
            "copies, set replicas and devices instead"
        )

    @field_validator("devices_per_replica", "decoders")
    @classmethod
    def _check_processes(cls, num: Auto | int, info: ValidationInfo) -> Auto | int:
        given = [info.data.get(name) for name in ("replicas", "devices_per_replica")]
        replicas, ranks = (each if isinstance(each, int) else 1 for each in given)
        each = 1 if num == "auto" else num + ranks if info.field_name == "decoders" else num
        if replicas * each > MAX_PROCESSES:
            raise ValueError(
                f"makes {replicas * each} processes with replicas = {replicas}; a model has "
                f"{MAX_PROCESSES} at most"
            )
        return num

    @field_validator("speed")
    @classmethod
    def _check_speed(cls, speed: str, info: ValidationInfo) -> str:
        if speed not in CHOICES:
            raise ValueError(f"is not one of {', '.join(CHOICES)}")
        placement = info.data.get("placement", "replicate")
        if placement != "replicate" and speed not in ("auto", "exact"):
            raise ValueError(
                f'changes a whole network, but with placement = "{placement}" no process has one: '
                "leave it at auto, which then means exact"
            )
        return speed

    def interface_over(self, interface: Interface) -> Interface:
        """Return how clients speak to the model, given what its class says: settings win."""
        given = {name: getattr(self, name) for name in ("path", "envelope", "form", "accepts")}
        changed = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(interface, **changed) if changed else interface

    @property
    def weight(self) -> float:
        """Its share, or what it counts as without one."""
        return 1.0 if self.share is None else self.share

    @property
    def split(self) -> Split | None:
        """How each replica is split; None if it lies on one device."""
        return None if self.placement == "replicate" else self.placement

    @property
    def batch_size(self) -> int:
        """The largest batch that workers warm up with."""
        return AUTO_SIZE if self.max_batch_size == "auto" else self.max_batch_size

    @property
    def placement_request(self) -> PlacementRequest:
        """The settings for the placement of the replicas."""
        return PlacementRequest(
            devices=self.devices,
            replicas=None if self.replicas == "auto" else self.replicas,
            threads=None if self.threads_per_replica == "auto" else self.threads_per_replica,
            split=self.split,
            ranks=None if self.devices_per_replica == "auto" else self.devices_per_replica,
            memory_fraction=None
            if self.gpu_memory_fraction == "auto"
            else self.gpu_memory_fraction,
        )

    def placements_on(self, host: Host) -> list[Placement]:
        """Return the placements of the replicas if this is the only model of the host.

        Raises:
            DeviceError: A requested device is not on this host, or there are too few.
        """
        return place(host, self.placement_request)

    @property
    def num_cores(self) -> int | None:
        """The cores that it computes with, if the settings fix that for any host; else None."""
        if self.replicas == "auto" or self.threads_per_replica == "auto":
            return None
        if self.split and self.devices_per_replica == "auto":
            return None
        return self.replicas * self.threads_per_replica * self.least_ranks

    @property
    def least_ranks(self) -> int:
        """The fewest processes of a replica on any host; decoders are not counted."""
        return 1 if self.devices_per_replica == "auto" else self.devices_per_replica

    @property
    def least_processes(self) -> int:
        """The fewest processes and threads of all replicas on any host."""
        threads, preparing, num_replicas = (
            1 if each == "auto" else each
            for each in (self.threads_per_replica, self.prepare_threads, self.replicas)
        )
        decoders = 0 if self.decoders == "auto" else self.decoders
        return num_replicas * (self.least_ranks * (threads + 1) + preparing + decoders)

    def model_config_for(self, name: str) -> ModelConfig:
        """Return the part of a worker's configuration that describes the model."""
        return ModelConfig(
            name=name,
            source=self.source,
            weights=None if self.weights.lower() == "none" else self.weights,
            options=dict(self.options),
        )

    def worker_config_for(
        self,
        name: str,
        placement: Placement,
        *,
        max_image_pixels: int,
        cache_dir: str | None = None,
        searches_speed: bool = False,
        error_detail: ErrorDetail = "name",
    ) -> WorkerConfig:
        """Return the configuration of the worker on one placement."""
        return WorkerConfig(
            model=self.model_config_for(name),
            placement=placement,
            credit=self.credit + placement.num_at_once - 1,
            max_batch_size=self.batch_size,
            max_batch_tokens=self.max_batch_tokens,
            may_batches_grow=self.max_batch_size == "auto",
            prepare_threads=self._num_prepare_threads(placement),
            decoders=self.num_decoders(placement),
            speed="exact" if placement.split else self.speed,
            decode=self.decode,
            measures_speed=not searches_speed,
            cache_dir=cache_dir,
            load_timeout_s=self.load_timeout_s,
            check=self.check,
            batch_timeout_s=None if self.batch_timeout_s == "auto" else self.batch_timeout_s,
            max_image_pixels=max_image_pixels,
            error_detail=error_detail,
        )

    def num_decoders(self, placement: Placement) -> int:
        """Return how many decoders the worker on a placement has, if its model allows it."""
        if self.decoders != "auto":
            return self.decoders
        num_cores = placement.num_threads * placement.num_ranks
        if "cpu" in placement.devices or num_cores < _LEAST_CORES:
            return 0  # decoding competes with the forward pass for the same cores
        return min(num_cores - _OWN_CORES, _MAX_DECODERS)

    def _num_prepare_threads(self, placement: Placement) -> int:
        if self.prepare_threads != "auto":
            return self.prepare_threads
        if "cpu" in placement.devices:
            return 1  # preparation competes with the forward pass for the same cores
        # In a split replica only the first process prepares, and the others hardly use their cores.
        return max(1, min(8, placement.num_threads * placement.num_ranks))
