"""Every setting of the service and of its models, checked, and what a worker is told of them.

Values of the front end; `service.settings_loader` makes them.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from models.spec import MAX_IMAGE_PIXELS, Placement, Split
from models.speed.names import CHOICES
from service.batch_sizes import AUTO_SIZE
from service.keys import Keys
from service.trace_settings import TraceHeaders, endpoint_of, pairs_of
from workers.cgroups import read_limits
from workers.config import ErrorDetail, ModelConfig, WorkerConfig
from workers.device_names import parse_devices
from workers.devices import Host
from workers.mps import DEFAULT_FOLDER
from workers.placing import Wish, place, share_cores

DEFAULT_SOURCE = "efficientnet_lite0"
BUILT_IN_SOURCES = (DEFAULT_SOURCE, "minilm_l6", "echo")
"""Sources that need neither a file nor a package of the user's."""
_MODEL_FILE_SUFFIXES = (".pt2", ".pt", ".ts", ".torchscript")
_WEIGHT_FILE_SUFFIXES = (".pth", ".safetensors")
_SOURCE_FORMS = (
    f"{', '.join(BUILT_IN_SOURCES)}, torchvision:NAME, encoder:FOLDER, package.module:Class, "
    f"or a {', '.join(_MODEL_FILE_SUFFIXES[:-1])} or {_MODEL_FILE_SUFFIXES[-1]} file"
)
_TORCHVISION_NAME = re.compile(
    r"alexnet|googlenet|inception_v3|(wide_)?resnet\d+(_2)?|resnext\d+_\d+x\d+d|vgg\d+(_bn)?"
    r"|densenet\d+|squeezenet1_\d|mnasnet\d_\d+|mobilenet_v\w+|shufflenet_v2_\w+"
    r"|efficientnet_(b\d|v2_[sml])|convnext_\w+|regnet_[xy]_\w+|vit_[blh]_\d+|swin_\w+|maxvit_t"
)
"""How torchvision names its classifiers; to import it for that would take seconds."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
"""As browsers write it (RFC 6454, 6.1)."""
_MIB = 2**20

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Auto = Literal["auto"]


class _Table(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class ModelSettings(_Table):
    """One model: the table `[models.NAME]` of the file."""

    source: str
    """`efficientnet_lite0`, `minilm_l6`, `echo`, `torchvision:NAME`, `encoder:FOLDER`,
    `package.module:Class`, or the path of a .pt2 file (torch.export) or of a .pt, .ts or
    .torchscript file (TorchScript).

    A model whose name is that of a built-in source needs none."""
    weights: str = Field("DEFAULT", min_length=1)
    """`DEFAULT`, a weight that torchvision names, a .pth or .safetensors file, or `none`."""
    options: Mapping[str, object] = Field(default_factory=dict)
    """Keyword arguments of your class, or of a built-in source."""
    replicas: Auto | PositiveInt = "auto"
    """Loaded copies; `auto`: one per GPU, or without a GPU one per group of CPU cores, which all
    models share out. Of a model that is split, one, or as many as `devices_per_replica` makes of
    the GPUs."""
    devices: str = "auto"
    """Where the replicas go: `auto` (every GPU, else the CPU), `cpu`, `cuda`, GPUs such as
    `cuda:0,1`, UUIDs of GPUs or of MIG slices, or several of these with commas between."""
    placement: Literal["replicate", "pipeline", "tensor"] = "replicate"
    """Whether each replica lies whole on one device, or is split over several: by stages
    (`pipeline`), or each of its large matrices by parts (`tensor`)."""
    devices_per_replica: Auto | PositiveInt = "auto"
    """The devices that a replica is split over, each with a process of its own; `auto`: the GPUs
    divided by `replicas`, all of them where that is `auto`, and on CPUs 2."""
    gpu_memory_fraction: Auto | Annotated[float, Field(gt=0, le=1)] = "auto"
    """Of its GPU's memory, the most that each process may allocate; `auto`: where several share a
    GPU, an equal share, less what CUDA takes itself."""
    max_batch_size: Auto | Annotated[int, Field(ge=1, le=65536)] = "auto"
    """The most instances that one forward pass serves; `auto`: 8, or up to 64 while a full batch
    takes a worker about a millisecond, which only next to no computation does."""
    batch_wait_ms: float = Field(0.0, ge=0, le=60_000, allow_inf_nan=False)
    """How long an idle worker waits for a batch to fill; 0: it starts with what is there."""
    objective_p99_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Within which 99 of 100 instances are to be answered, from their arrival: batches are kept as
    small as that takes, and what would be late is refused with 429. By default there is none."""
    batch_timeout_s: Auto | PositiveSeconds = "auto"
    """A batch that has run for longer means a hang: its worker is killed and replaced. Waits for
    other batches of a pipeline don't count. `auto`: ten times the longest batch of the warm-up, at
    least 10 s; without a warm-up, 60 s."""
    load_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """A worker that has not become ready by then is killed, and started again."""
    credit: int = Field(2, ge=1, le=64)
    """Batches that a worker may hold at once: one that runs, the rest in preparation. A pipeline
    runs one for each stage (four at most), and holds more for that."""
    max_restarts: int = Field(5, ge=0)
    """A worker that has never been ready is given up after this many restarts in a row."""
    threads_per_replica: Auto | PositiveInt = "auto"
    """Threads that torch computes with in each replica, and of a split one in each of its
    processes; `auto`: an equal share of the cores that the model has."""
    speed: str = "auto"
    """`exact` serves the network as it is, `auto` with the fastest preset that agrees with that; or
    name a preset: `channels_last`, `folded`, `bf16`, `fp16`, `compiled`, `compiled_bf16`,
    `graphed`, `graphed_fp16`. A model that is split is served exactly."""
    decode: Literal["auto", "exact", "fast"] = "auto"
    """How encoded images become pixels: `exact` as the model's authors did it, `fast` with large
    JPEGs decoded smaller and other roundings, `auto` fast where that agrees with exact (and exact
    where `speed` is)."""
    prepare_threads: Auto | PositiveInt = "auto"
    """Threads that decode and resize in each worker; `auto`: 1 on a CPU, up to 8 for a GPU."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if not is_source(source):
            raise ValueError(f"is not a source; {source_hint(source, BUILT_IN_SOURCES)}")
        return source

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: str) -> str:
        parse_devices(devices)
        return devices

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, placement: str, info: ValidationInfo) -> str:
        source = str(info.data.get("source"))
        if placement != "replicate" and (source == "echo" or source.endswith(_MODEL_FILE_SUFFIXES)):
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
            'is for a model that is split: set placement = "pipeline" or "tensor" too; how many '
            "devices have a copy of their own is said by replicas and devices"
        )

    @field_validator("speed")
    @classmethod
    def _check_speed(cls, speed: str, info: ValidationInfo) -> str:
        if speed not in CHOICES:
            raise ValueError(f"is not one of {', '.join(CHOICES)}")
        placement = info.data.get("placement", "replicate")
        if placement != "replicate" and speed not in ("auto", "exact"):
            raise ValueError(
                f'changes a whole network, and with placement = "{placement}" no process has one: '
                "leave it at auto, which then means exact"
            )
        return speed

    @property
    def split(self) -> Split | None:
        """How each replica is split; None where it lies on one device."""
        return None if self.placement == "replicate" else self.placement

    @property
    def batch_size(self) -> int:
        """The largest batch that workers warm up with."""
        return AUTO_SIZE if self.max_batch_size == "auto" else self.max_batch_size

    def placements_on(self, host: Host) -> list[Placement]:
        """Where the replicas go, if this is the only model of the host.

        Raises:
            DeviceError: A device asked for is not on this host, or there are too few.
        """
        wish = Wish(
            devices=self.devices,
            replicas=None if self.replicas == "auto" else self.replicas,
            threads=None if self.threads_per_replica == "auto" else self.threads_per_replica,
            split=self.split,
            ranks=None if self.devices_per_replica == "auto" else self.devices_per_replica,
            memory_fraction=None
            if self.gpu_memory_fraction == "auto"
            else self.gpu_memory_fraction,
        )
        return place(host, wish)

    @property
    def num_cores(self) -> int | None:
        """What it computes with, if the settings say so whatever the host is like."""
        if self.replicas == "auto" or self.threads_per_replica == "auto":
            return None
        if self.split and self.devices_per_replica == "auto":
            return None
        ranks = 1 if self.devices_per_replica == "auto" else self.devices_per_replica
        return self.replicas * self.threads_per_replica * ranks

    def model_config_for(self, name: str) -> ModelConfig:
        """What a worker is told of the model."""
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
        error_detail: ErrorDetail = "name",
    ) -> WorkerConfig:
        """All that the worker on one placement is told."""
        return WorkerConfig(
            model=self.model_config_for(name),
            placement=placement,
            credit=self.credit + placement.num_at_once - 1,
            max_batch_size=self.batch_size,
            prepare_threads=self._num_prepare_threads(placement),
            speed="exact" if placement.split else self.speed,
            decode=self.decode,
            cache_dir=cache_dir,
            load_timeout_s=self.load_timeout_s,
            batch_timeout_s=None if self.batch_timeout_s == "auto" else self.batch_timeout_s,
            max_image_pixels=max_image_pixels,
            error_detail=error_detail,
        )

    def _num_prepare_threads(self, placement: Placement) -> int:
        if self.prepare_threads != "auto":
            return self.prepare_threads
        if "cpu" in placement.devices:
            return 1  # preparation competes with the forward pass for the same cores
        # Of a split replica the first process prepares, and the others need next to no core.
        return max(1, min(8, placement.num_threads * placement.num_ranks))


class Settings(_Table):
    """Everything that can be set; the top level of the file."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port to listen on; 0 lets the system choose one."""
    front_ends: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Processes that take calls on this port, before one queue and one pool; `auto`: one, and from
    eight cores on one for every four cores, at most four."""
    default_model: str
    """The model that `/predict` means where none is named; by default the first one."""
    log_format: Literal["auto", "human", "json"] = "auto"
    """Log lines for people or for machines; `auto`: for people on a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log lines to write."""
    color: Literal["auto", "never"] = "auto"
    """Whether a terminal gets colours. The variable NO_COLOR means `never`."""
    trace_endpoint: str | None = None
    """Where traces go: an OpenTelemetry collector's URL for OTLP over HTTP, such as
    `http://localhost:4318`; where it has no path, /v1/traces. The variable
    OTEL_EXPORTER_OTLP_ENDPOINT sets it too. By default nothing is traced."""
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    """The share of calls to trace of those whose caller has not decided; the variables
    OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG set it too."""
    trace_parent_based: bool = True
    """Whether the `traceparent` of a call decides if it is traced."""
    trace_service_name: str = Field("inferpool", min_length=1)
    """What traces call this service; the variable OTEL_SERVICE_NAME sets it too."""
    trace_resource: str = ""
    """What else traces say of it: `deployment.environment.name=test,host.name=a`; the variable
    OTEL_RESOURCE_ATTRIBUTES sets it too."""
    trace_headers: TraceHeaders = TraceHeaders()
    """Headers that the collector wants, such as a key. Only the environment gives them
    (INFERPOOL_TRACE_HEADERS or OTEL_EXPORTER_OTLP_HEADERS, as `name=value,name=value`)."""
    trace_certificate: str | None = None
    """A PEM file: the authority of the collector's certificate, where the system does not know it;
    the variable OTEL_EXPORTER_OTLP_CERTIFICATE sets it too."""
    predict_keys: Keys = Keys()
    """API keys that may ask for predictions; without any, everyone may. Only the environment
    (INFERPOOL_PREDICT_KEYS, with commas between) and the files below give keys: never this file."""
    predict_keys_file: str | None = None
    """A file of such keys, one to a line, such as a docker secret."""
    metrics_keys: Keys = Keys()
    """API keys for /metrics, /health and /events; without any, `predict_keys` are for those too."""
    metrics_keys_file: str | None = None
    """A file of such keys."""
    admin_keys: Keys = Keys()
    """API keys for /admin, which is not there without any."""
    admin_keys_file: str | None = None
    """A file of such keys."""
    tls_certificate: str | None = None
    """A PEM file: this server's certificate, and those that lead to a known authority."""
    tls_key: str | None = None
    """A PEM file: the certificate's private key, without a password; where it is not set, it is in
    the file of the certificate."""
    docs: bool = True
    """Whether /docs and /openapi.json are served; they name the models, and need no key."""
    cors_origins: Sequence[str] = ()
    """Origins whose pages may ask this host from a browser, such as `https://app.example`, or `*`
    for all (CORS). Variable and flag have commas between them. Cookies are not asked for."""
    page: bool = True
    """Whether the page at / is served; what it shows needs the keys of /events and /predict."""
    max_connections: Auto | PositiveInt = "auto"
    """Connections at once; `auto`: what the limit of open files allows, at most 10,000. Beyond, the
    longest idle one is closed, or the newcomer is refused with 503 (over TLS, closed)."""
    head_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """How long request line and headers may take to arrive, and a TLS handshake before them."""
    body_gap_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Each such time must bring 4 KiB of a body that is on its way, or the rest of it."""
    write_timeout_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """A client that takes nothing of its answer for so long is cut off."""
    max_body_bytes: int = Field(16 * _MIB, ge=1024)
    """The largest body of a request."""
    max_json_bytes: int = Field(4 * _MIB, ge=1024)
    """The largest JSON body, which is parsed where all other requests wait meanwhile: 4 MiB take
    9 ms, and 21 ms at worst."""
    max_unfinished_bytes: int = Field(128 * _MIB, ge=1024)
    """What may be kept of requests that are on their way, over all connections: bodies and heads
    that are not whole, and calls that wait behind others of their connection. Without room the
    slowest that began more than a second ago are refused with 429, or else the newcomer; one body
    of `max_body_bytes` may always be kept. Whole bodies are in the arena instead."""
    max_unread_bytes: int = Field(256 * _MIB, ge=1024)
    """What may be kept of answers that clients have not read, over all connections; beyond, the
    slowest readers are cut off."""
    arena_bytes: int = Field(
        default_factory=lambda data: _auto_arena_bytes(data["max_body_bytes"]), ge=1024
    )
    """Shared memory for payloads; `auto`: a tenth of the memory, at most 256 MiB and at least twice
    `max_body_bytes`."""
    max_queue_length: int = Field(1024, ge=1)
    """Instances that may wait for each model; more are refused with 429."""
    quarantine_s: float = Field(300.0, ge=0, allow_inf_nan=False)
    """How long an input that has killed workers is refused with 422; 0: it is tried each time."""
    max_instances_per_request: int = Field(256, ge=1)
    """Instances in one HTTP call."""
    max_image_pixels: int = Field(MAX_IMAGE_PIXELS, ge=1)
    """Pixels of an encoded image, by its header; more are refused with 422 before anything is
    decoded. While it is decoded, a pixel takes a worker 4 to 17 bytes (a WebP most)."""
    show_errors: bool = False
    """Whether clients are told the text of an exception that a model raises. By default they are
    told its type; the log has the rest, under the id of the request."""
    default_timeout_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """How long a call may take if it does not say."""
    max_timeout_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """The longest time that a call may take; one that asks for more gets this."""
    drain_timeout_s: float = Field(20.0, ge=0, allow_inf_nan=False)
    """At shutdown, how long accepted work may take to finish. Most platforms kill after 30 s."""
    shutdown_delay_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    """At shutdown, how long to go on serving while readiness is red, so that balancers notice."""
    keep_alive_s: float = Field(75.0, gt=0, allow_inf_nan=False)
    """How long an idle connection stays open: longer than the 60 s of common load balancers, which
    would otherwise send a request into a connection that is just being closed."""
    cache_dir: str = Field("~/.cache/inferpool", min_length=1)
    """Where workers keep what they find out about speed; `none` keeps it nowhere. The variable
    XDG_CACHE_HOME moves it."""
    speed_search: bool = True
    """Whether presets that take minutes to make are searched for while workers serve, by a process
    at idle priority, and changed over to if they are faster; where `speed` is `auto`, on CPUs."""
    cuda_visible_devices: str | None = None
    """The GPUs to use, as indices or UUIDs; from CUDA_VISIBLE_DEVICES."""
    cuda_mps_pipe_directory: str = Field(DEFAULT_FOLDER, min_length=1)
    """Where CUDA finds the Multi-Process Service, if it runs; from CUDA_MPS_PIPE_DIRECTORY."""
    models: Mapping[str, ModelSettings]
    """The models to serve, by name."""

    @field_validator("arena_bytes", mode="before")
    @classmethod
    def _choose_arena(cls, arena_bytes: object, info: ValidationInfo) -> object:
        if arena_bytes == "auto" and "max_body_bytes" in info.data:
            return _auto_arena_bytes(info.data["max_body_bytes"])
        return arena_bytes

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, origins: object) -> object:
        if isinstance(origins, str):  # as a variable and a flag have them
            return [origin.strip() for origin in origins.split(",") if origin.strip()]
        return origins

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: Sequence[str]) -> Sequence[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"has {origin!r}, which is no origin: write scheme, host and port alone, in "
                    "lower case, as browsers send them, such as https://app.example or "
                    "http://localhost:3000"
                )
        return tuple(origins)

    @field_validator("trace_endpoint")
    @classmethod
    def _complete_endpoint(cls, endpoint: str | None) -> str | None:
        return None if endpoint is None else endpoint_of(endpoint)

    @field_validator("trace_resource")
    @classmethod
    def _check_resource(cls, resource: str) -> str:
        pairs_of(resource)
        return resource

    @field_validator("tls_key")
    @classmethod
    def _check_tls_key(cls, tls_key: str | None, info: ValidationInfo) -> str | None:
        if tls_key is not None and info.data.get("tls_certificate") is None:
            raise ValueError("is a key without a certificate; set tls_certificate too")
        return tls_key

    def host_of(self, name: str, host: Host) -> Host:
        """What a model may take for its host: the models share out the cores."""
        asked = [model.num_cores for model in self.models.values()]
        return share_cores(host, asked)[list(self.models).index(name)]

    def placements_of(self, name: str, host: Host) -> list[Placement]:
        """Where the replicas of a model go; see `ModelSettings.placements_on`."""
        return self.models[name].placements_on(self.host_of(name, host))

    def cache_folder(self) -> str | None:
        """`cache_dir` as an absolute path; None for `none`, or where the user has no home."""
        if self.cache_dir.lower() == "none":
            return None
        try:
            return str(Path(self.cache_dir).expanduser().absolute())
        except RuntimeError:
            return None

    def sources(self) -> list[str]:
        """The sources of all models, and those that they wrap."""
        wrapped = [model.options.get("source") for model in self.models.values()]
        own = [model.source for model in self.models.values()]
        return own + [source for source in wrapped if isinstance(source, str)]

    @field_validator("arena_bytes")
    @classmethod
    def _check_arena(cls, arena_bytes: int, info: ValidationInfo) -> int:
        # A slot of the arena is a power of two, so the largest body may take nearly twice its size.
        least = 2 * info.data.get("max_body_bytes", 0)
        if arena_bytes < least:
            raise ValueError(f"is less than twice max_body_bytes, which makes {least}")
        return arena_bytes

    @field_validator("max_timeout_s")
    @classmethod
    def _check_timeout(cls, max_timeout_s: float, info: ValidationInfo) -> float:
        default_s = info.data.get("default_timeout_s", 0)
        if max_timeout_s < default_s:
            raise ValueError(f"is less than default_timeout_s, which is {default_s:g}")
        return max_timeout_s


def is_source(text: str) -> bool:
    """Whether this has the form of a source; whether there is such a thing is not asked."""
    if text in BUILT_IN_SOURCES or text.endswith(_MODEL_FILE_SUFFIXES):
        return True
    kind, colon, name = text.partition(":")
    return bool(kind and colon and name)


def slug(source: str) -> str:
    """A name for the model of a source, fit for URLs: "torchvision:resnet18" gives "resnet18"."""
    last = re.split(r"[:/\\]", source.rstrip("/"))[-1].lower()
    for suffix in _MODEL_FILE_SUFFIXES:
        last = last.removesuffix(suffix)
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")[:64] or "model"


def source_hint(text: str, candidates: Sequence[str]) -> str:
    """What to say of a text that was meant as a source; of the candidates, the nearest is named."""
    if text.endswith(_WEIGHT_FILE_SUFFIXES):
        return "this is a file of weights: give the network as source, and it as --weights"
    if text.endswith(".toml"):
        return f"this is a file of settings: use --config {text}"
    if _TORCHVISION_NAME.fullmatch(text.lower()):
        near = did_you_mean(text, candidates).removeprefix("did you mean ")
        return f"did you mean torchvision:{text.lower()}{' or ' + near.rstrip() if near else '?'}"
    return f"{did_you_mean(text, candidates)}a source is {_SOURCE_FORMS}"


def did_you_mean(text: str, candidates: Sequence[str]) -> str:
    """A question that names the nearest candidate, and a space; empty where none is near."""
    near = next(iter(difflib.get_close_matches(text, candidates, n=1)), None)
    return f"did you mean {near}? " if near else ""


def _auto_arena_bytes(max_body_bytes: int) -> int:
    tenth = _memory_bytes() // 10 // _MIB * _MIB
    return max(2 * max_body_bytes, min(256 * _MIB, tenth))


def _memory_bytes() -> int:
    """The memory that this host has, or that its control groups allow."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_limits().memory_bytes
    return physical if limit is None else min(physical, limit)
