"""The settings of the service; those of a model are in `service.settings.model`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qs

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from inferpool.models.spec import MAX_IMAGE_PIXELS, Placement
from inferpool.service.settings.address import address_of
from inferpool.service.settings.bounds import (
    MAX_MODELS,
    YEAR_S,
    Auto,
    Bytes,
    Length,
    Seconds,
    SecondsOrZero,
    Text,
    Texts,
)
from inferpool.service.settings.keys import Keys
from inferpool.service.settings.model import ModelSettings, SettingsTable
from inferpool.service.settings.tracing import TraceHeaders, endpoint_of, pairs_of
from inferpool.service.settings.trust import Origins, Peers, RootPath
from inferpool.workers.host.devices import Host
from inferpool.workers.host.mps import DEFAULT_FOLDER
from inferpool.workers.host.placing import share_cores
from inferpool.workers.shared.cgroups import read_limits

_MIB = 2**20
_LEAST_CORES, _CORES_PER_FRONT = 8, 4
"""With fewer cores there is one front end; else `auto` makes one for each four, as far as the next
two bounds allow."""
_MOST_FRONTS, _MOST_FRONTS_OF_GPUS = 4, 8
_FRONTS_PER_GPU = 2
"""A GPU that computes 6,000 tensors of 602 KB per second needs 1.2 cores of front ends."""


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address to listen on."""
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # the name of a host
        return False


def _check_job_store(job_store: str) -> str:
    scheme, is_url, rest = job_store.partition("://")
    if is_url and scheme != "postgresql":
        raise ValueError("is a URL that does not begin with postgresql://")
    has_password = ":" in rest.partition("/")[0].rpartition("@")[0]
    if has_password or (is_url and "password" in parse_qs(rest.partition("?")[2])):
        raise ValueError("has a password; give that in PGPASSWORD or in ~/.pgpass instead")
    return job_store


JobStore = Annotated[Text, AfterValidator(_check_job_store)]


def _beside(other: str) -> Callable[[str | None, ValidationInfo], str | None]:
    """Return a check of a file that is of no use without another one."""

    def check(path: str | None, info: ValidationInfo) -> str | None:
        if path is not None and info.data.get(other) is None:
            raise ValueError(f"is of no use alone; set {other} too")
        return path

    return check


def _check_sagemaker(is_on: bool, info: ValidationInfo) -> bool:
    if is_on and info.data.get("torchserve") is not None:
        text = "gives /ping and /models another meaning than torchserve: leave one out"
        raise ValueError(f"{text}, or set sagemaker to false")
    return is_on


def _check_health_route(route: str | None, info: ValidationInfo) -> str | None:
    if route is not None and route == info.data.get("vertex_predict_route"):
        raise ValueError("is the path of predictions too (vertex_predict_route); give each its own")
    return route


class Settings(SettingsTable):
    """All settings: the top level of the file."""

    host: Text = Field("127.0.0.1", min_length=1)
    """The address to listen on; 0.0.0.0 for every interface."""
    port: int = Field(8000, ge=0, le=65535)
    """The TCP port to listen on; 0 lets the system choose one."""
    grpc_port: int | None = Field(None, ge=0, le=65535)
    """The TCP port of the Open Inference Protocol over gRPC; 0: any. By default there is none."""
    front_ends: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Processes that take calls on the port and share one queue. `auto`: one; from eight cores on
    one for every four, at most four, or two for each of several GPUs and at most eight."""
    default_model: Text
    """The model that `/predict` uses if none is named; by default the first one."""
    log_format: Literal["auto", "human", "json"] = "auto"
    """The form of log lines: `human`, `json`, or `auto`: `human` on a terminal, else `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log lines to write: `debug`, `info`, `warning` or `error`."""
    color: Literal["auto", "never"] = "auto"
    """Colours on a terminal. The variable NO_COLOR means `never`."""
    trace_endpoint: Text | None = None
    """The URL of an OpenTelemetry collector (OTLP over HTTP) to send traces to, such as
    `http://localhost:4318`; a URL without a path gets /v1/traces. The variable
    OTEL_EXPORTER_OTLP_ENDPOINT sets it too. By default nothing is traced."""
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    """The share of calls to trace, among those whose caller has not decided. The variables
    OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG set it too."""
    trace_parent_based: bool = True
    """Let the `traceparent` of a call decide whether it is traced."""
    trace_service_name: Text = Field("inferpool", min_length=1)
    """The name of this service in traces. The variable OTEL_SERVICE_NAME sets it too."""
    trace_resource: Text = ""
    """More attributes of this service in traces: `deployment.environment.name=test,host.name=a`.
    The variable OTEL_RESOURCE_ATTRIBUTES sets it too."""
    trace_headers: TraceHeaders = TraceHeaders()
    """Headers that the collector needs, such as a key. Only the environment gives them
    (INFERPOOL_TRACE_HEADERS or OTEL_EXPORTER_OTLP_HEADERS, as `name=value,name=value`)."""
    trace_certificate: Text | None = None
    """A PEM file with the authority of the collector's certificate, if the system does not know it.
    The variable OTEL_EXPORTER_OTLP_CERTIFICATE sets it too."""
    predict_keys: Keys = Keys()
    """API keys for predictions; without any, everyone may ask. They come only from the environment
    (INFERPOOL_PREDICT_KEYS, separated by commas) and from the files below, never from this file."""
    predict_keys_file: Text | None = None
    """A file of keys for predictions, one to a line, such as a docker secret."""
    metrics_keys: Keys = Keys()
    """API keys for /metrics, /health and /events; without any, `predict_keys` open those too."""
    metrics_keys_file: Text | None = None
    """A file of keys for /metrics, /health and /events, one to a line."""
    admin_keys: Keys = Keys()
    """API keys for /admin, which does not exist without any."""
    admin_keys_file: Text | None = None
    """A file of keys for /admin, one to a line."""
    tls_certificate: Text | None = None
    """Serve HTTPS with this PEM file, which has this server's certificate and those that lead to a
    known authority."""
    tls_key: Text | None = None
    """A PEM file with the certificate's private key, without a password; by default the key is in
    the file of the certificate."""
    docs: bool = True
    """Serve /docs and /openapi.json, which name the models and need no key."""
    cors_origins: Origins = ()
    """Origins whose pages may call this host from a browser (CORS), such as `https://app.example`,
    or `*` for all. Separate them by commas in the variable and the flag. Cookies are not used."""
    root_path: RootPath = ""
    """The path that a proxy serves this service under, such as `/models`. Calls may come with it or
    without, and addresses in answers begin with it. They are relative without, which works behind
    every proxy that removes its path."""
    proxy_headers: bool = True
    """Use `X-Forwarded-Proto`, `X-Forwarded-Host` and `X-Forwarded-Prefix` of the proxies in
    `forwarded_allow_ips`, for addresses in answers and for nothing else."""
    forwarded_allow_ips: Peers = ()
    """Addresses and networks of proxies whose headers count, such as `10.0.0.5` or `10.0.0.0/8`, or
    `*` for everyone. By default nobody's do. Separate them by commas in the variable and the
    flag."""
    tei: bool = False
    """Serve the paths of Text Embeddings Inference too: /embed, /rerank, /predict with `inputs` and
    the others for the default model, and all of them for any model below /tei/NAME."""
    torchserve: Text | None = Field(None, min_length=1)
    """Serve as TorchServe does by this `config.properties`: its archives, paths and addresses."""
    sagemaker: Annotated[bool, AfterValidator(_check_sagemaker)] = False
    """Serve the paths of a container of Amazon SageMaker too: /ping and /invocations."""
    sagemaker_models: Text | None = None
    """The folder below which SageMaker may have models loaded at /models, without a key; from
    SAGEMAKER_MULTI_MODEL."""
    vertex_predict_route: Text | None = None
    """The path for calls as Vertex AI makes them; from AIP_PREDICT_ROUTE."""
    vertex_health_route: Annotated[Text | None, AfterValidator(_check_health_route)] = None
    """The path for health checks of Vertex AI; from AIP_HEALTH_ROUTE."""
    only_predictions: bool = False
    """Serve nothing besides calls to models and the checks whether this host is alive and ready: no
    page, documentation, events, metrics or /admin, and no texts of exceptions. Platforms that make
    a container public turn it on."""
    page: bool = True
    """Serve the page at /. What it shows needs the keys of /events and /predict."""
    max_connections: Auto | Length = "auto"
    """Connections at once. `auto`: what the limit of open files allows, at most 10,000. Beyond that
    the longest idle one is closed, or the new one is refused with 503 (over TLS, closed)."""
    head_timeout_s: Seconds = 10.0
    """How long the request line and headers may take to arrive, and a TLS handshake before them."""
    body_gap_s: Seconds = 10.0
    """A body on its way must bring 4 KiB, or its rest, within each such time."""
    write_timeout_s: Seconds = 30.0
    """A client that reads nothing of its answer for so long is cut off."""
    max_body_bytes: int = Field(16 * _MIB, ge=1024, le=2**36)
    """The largest body of a request."""
    max_json_bytes: Bytes = 4 * _MIB
    """The largest JSON body. Parsing holds up all other requests."""
    max_unfinished_bytes: Bytes = 128 * _MIB
    """Memory for requests on their way, over all front ends: unfinished bodies and heads, and
    calls that wait behind others of their connection. If it is full, the slowest that began more
    than a second ago are refused with 429, those of the key or address that has the most, or else
    the new one. One body of `max_body_bytes` always has room. Complete bodies are in the arena
    instead."""
    max_unread_bytes: Bytes = 256 * _MIB
    """Memory for answers that clients have not read, over all front ends. If it is full, the
    slowest readers of the key or address that has the most are cut off."""
    stream_buffer_parts: int = Field(64, ge=1, le=2**20)
    """Parts of a stream that are kept for a client that does not read them. With more of them, its
    stream ends with the error `reader_too_slow`."""
    stream_buffer_bytes: Bytes = _MIB
    """Bytes of such parts of a stream; a single part may be larger."""
    arena_bytes: Bytes = Field(
        default_factory=lambda data: auto_arena_bytes(data["max_body_bytes"])
    )
    """Shared memory for payloads. `auto`: a tenth of the memory, at most 256 MiB and at least twice
    `max_body_bytes`."""
    max_queue_length: Length = 1024
    """Instances that may wait for each model; more are refused with 429."""
    per_key_share: float = Field(0.75, gt=0, le=1)
    """The largest part of what the others leave that one of several `predict_keys` may take of each
    model's queue, of the time until its deadlines, of `arena_bytes` and of what jobs use; more is
    refused with 429. Uploads and streams of events are shared by address where keys do not tell
    clients apart. 1: all of it."""
    quarantine_s: float = Field(300.0, ge=0, le=YEAR_S, allow_inf_nan=False)
    """How long an input that has killed workers is refused with 422; 0: it is tried each time."""
    max_instances_per_request: Length = 256
    """Instances in one HTTP call."""
    max_image_pixels: int = Field(MAX_IMAGE_PIXELS, ge=1, le=2**32)
    """Pixels of an encoded image, by its header; more are refused with 422 before decoding.
    Decoding takes a worker 4 to 17 bytes a pixel (a WebP the most)."""
    show_errors: Auto | bool = "auto"
    """Show clients the text of an exception that a model raises. Else they get its type, and the
    log has the rest under the id of the request. `auto`: with `--reload`, and where `serve` runs at
    a terminal, listens on a loopback address, and has neither keys nor trusted proxies."""
    default_timeout_s: Seconds = 30.0
    """How long a call may take if it does not say."""
    max_timeout_s: Seconds = 300.0
    """The longest time that a call may take. One that asks for more gets this."""
    drain_timeout_s: SecondsOrZero = 20.0
    """How long accepted work may take to finish at shutdown. Most platforms kill after 30 s."""
    shutdown_delay_s: SecondsOrZero = 0.0
    """How long to go on serving at shutdown while readiness is red, so that load balancers
    notice."""
    keep_alive_s: Seconds = 75.0
    """How long an idle connection stays open. It is longer than the 60 s of common load balancers,
    which would otherwise send a request into a connection that is just being closed."""
    cache_dir: Text = Field("~/.cache/inferpool", min_length=1)
    """The folder where workers keep what they measure about speed; `none` keeps nothing. The
    variable XDG_CACHE_HOME moves it."""
    state_file: Text = Field("auto", min_length=1)
    """The file that keeps what is changed of models at run time, for the next start; `none` keeps
    nothing. `auto`: beside the file of settings, as `inferpool.state.json`; none without such a
    file, or if MODEL is given."""
    job_store: JobStore = Field("auto", min_length=1)
    """The place of jobs: a folder, or `postgresql://USER@HOST/DATABASE`, which several services can
    share; `none`: there are no jobs. `auto`: a folder in the user's state directory, one for each
    file of settings, or for each model and port. Passwords come from PGPASSWORD or ~/.pgpass."""
    job_retention_s: float = Field(86400.0, gt=0, le=10 * YEAR_S, allow_inf_nan=False)
    """A job and its results are deleted so long after its end."""
    job_share: float = Field(0.0, ge=0, le=0.5)
    """The part of a model's time that its jobs get even if other calls wait. With 0 they get what
    others leave: workers that are idle, and room in batches."""
    max_jobs: int = Field(10_000, ge=1, le=10**9)
    """Jobs that each of `predict_keys`, or all calls without keys, may have in the store."""
    max_job_bytes: int = Field(16 << 30, ge=1024, le=2**50)
    """Bytes in the store that these may take."""
    webhook_hosts: Texts = ()
    """Hosts that may be told when a job is over: names, `*.example.com`, or `*`. A host with a
    private address must be named in full. Separate them by commas in the variable and the flag."""
    webhook_secret_file: Text | None = None
    """A file with the key that signs these calls, as Standard Webhooks say: `whsec_` and base64."""
    watch: Text | None = None
    """A folder of models to serve as they come and go: one subfolder for each, with a numbered one
    for each version, of which the highest serves."""
    watch_policy: Literal["verified", "shadow", "canary", "force"] = "verified"
    """How a later version in that folder is judged before it serves; see `/admin/models`."""
    speed_search: bool = True
    """Search for faster presets and decoders while workers serve, in a process at low priority,
    and change over to what it finds; for models with `speed` at `auto`. Otherwise workers measure
    before they are ready, and nothing is compiled."""
    cuda_visible_devices: Text | None = None
    """The GPUs to use, as indices or UUIDs, or `all`; from CUDA_VISIBLE_DEVICES."""
    cuda_device_order: Text = "FASTEST_FIRST"
    """The order that these indices follow; from CUDA_DEVICE_ORDER. With `PCI_BUS_ID` it is that of
    `nvidia-smi`. Otherwise it is CUDA's own, which is unknown where there are several kinds of GPU:
    name those by UUID."""
    cuda_mps_pipe_directory: Text = Field(DEFAULT_FOLDER, min_length=1)
    """The folder where CUDA finds the Multi-Process Service, if it runs; from
    CUDA_MPS_PIPE_DIRECTORY."""
    cluster_keys: Keys = Keys()
    """Keys of which an agent must know one to join. Only the environment (INFERPOOL_CLUSTER_KEYS)
    and the file below give them."""
    cluster_keys_file: Text | None = None
    """A file of keys of which an agent must know one, one to a line."""
    cluster_authority: Text | None = None
    """A PEM file with the authority that has signed the certificates of agents."""
    cluster_certificate: Text | None = None
    """A PEM file with the certificate to show agents, which must show one too: TLS on both
    sides."""
    cluster_key: Text | None = None
    """A PEM file with the certificate's private key; by default the key is in the same file."""
    cluster_insecure: bool = False
    """Let agents join without TLS over an address that is not private. Inputs and answers then
    cross the network as they are."""
    cluster_host: Text = Field("127.0.0.1", min_length=1)
    """The address that agents join at."""
    cluster_port: int | None = Field(None, ge=0, le=65535)
    """The TCP port that agents join at (`inferpool agent --join`), whose hosts then compute all
    models; 0 lets the system choose one. By default there is no cluster."""
    standby_of: Text | None = None
    """The other front end's cluster address (`HOST:PORT`), if this one is to take over from it."""
    models: Mapping[str, ModelSettings] = Field(max_length=MAX_MODELS)
    """The models to serve, by name."""

    @field_validator("arena_bytes", mode="before")
    @classmethod
    def _choose_arena(cls, arena_bytes: object, info: ValidationInfo) -> object:
        if arena_bytes == "auto" and "max_body_bytes" in info.data:
            return auto_arena_bytes(info.data["max_body_bytes"])
        return arena_bytes

    @field_validator("cors_origins", "forwarded_allow_ips", "webhook_hosts", mode="before")
    @classmethod
    def _split(cls, listed: object) -> object:
        if isinstance(listed, str):  # from a variable or a flag
            return tuple(each.strip() for each in listed.split(",") if each.strip())
        return tuple(listed) if isinstance(listed, list) else listed

    @field_validator("trace_endpoint")
    @classmethod
    def _complete_endpoint(cls, endpoint: str | None) -> str | None:
        return None if endpoint is None else endpoint_of(endpoint)

    @field_validator("trace_resource")
    @classmethod
    def _check_resource(cls, resource: str) -> str:
        pairs_of(resource)
        return resource

    _check_tls_key = field_validator("tls_key")(_beside("tls_certificate"))
    _check_certificate = field_validator("cluster_certificate")(_beside("cluster_authority"))
    _check_cluster_key = field_validator("cluster_key")(_beside("cluster_certificate"))

    @field_validator("cluster_port")
    @classmethod
    def _check_cluster(cls, port: int | None, info: ValidationInfo) -> int | None:
        if port is not None and not info.data.get("cluster_keys"):
            raise ValueError(
                "needs a key that agents must know; put one of at least 16 characters into "
                "INFERPOOL_CLUSTER_KEYS, or into a file named by cluster_keys_file"
            )
        return port

    @field_validator("standby_of")
    @classmethod
    def _check_standby(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        try:
            address_of(address)
        except ValueError:
            text = "is not an address; write HOST:PORT of the other's cluster port"
            raise ValueError(text) from None
        if info.data.get("cluster_port") is None:
            raise ValueError("is for a cluster; set cluster_port too")
        return address

    @property
    def key_share(self) -> float:
        """The `per_key_share` in force: 1, which is no bound, where no two keys could share."""
        return self.per_key_share if len(self.predict_keys) > 1 else 1.0

    @property
    def has_jobs(self) -> bool:
        """There is a place for jobs; the loader makes one of `auto`."""
        return self.job_store not in ("auto", "none")

    def host_of(self, name: str, host: Host) -> Host:
        """Return the part of the host that a model may use.

        The cores are divided among the models, unless these take turns at all of them. Beside GPUs,
        each front end keeps a core: few cores feed a GPU, and what comes to it passes them all.
        """
        if host.gpus and self.models[name].devices != "cpu":
            num_fronts = self.num_front_ends(host.num_cores, len(host.gpus))
            kept = min(num_fronts, host.num_cores // 2) if host.num_cores >= _LEAST_CORES else 0
            host = replace(host, num_cores=host.num_cores - kept)
        if any(model.share is not None for model in self.models.values()):
            return host
        asked = [model.num_cores for model in self.models.values()]
        return share_cores(host, asked)[list(self.models).index(name)]

    def num_front_ends(self, num_cores: int, num_gpus: int) -> int:
        """Return the number of front ends, as far as the arena has room for them."""
        if self.front_ends != "auto":
            return self.front_ends
        most = max(_MOST_FRONTS, min(_MOST_FRONTS_OF_GPUS, _FRONTS_PER_GPU * num_gpus))
        return min(most, num_cores // _CORES_PER_FRONT) if num_cores >= _LEAST_CORES else 1

    def placements_of(self, name: str, host: Host) -> list[Placement]:
        """Return the placements of a model's replicas; see `ModelSettings.placements_on`."""
        return self.models[name].placements_on(self.host_of(name, host))

    def cache_folder(self) -> str | None:
        """Return `cache_dir` as an absolute path; None for `none`, or if the user has no home."""
        if self.cache_dir.lower() == "none":
            return None
        try:
            return str(Path(self.cache_dir).expanduser().absolute())
        except RuntimeError:
            return None

    def sources(self) -> list[str]:
        """Return the sources of all models, and those that they wrap."""
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


def shows_errors(settings: Settings, *, at_terminal: bool) -> bool:
    """Return the `show_errors` in force, where `serve` runs at a terminal or not.

    Clients of a loopback address may be anybody if there are keys or trusted proxies.
    """
    if settings.only_predictions:
        return False
    if settings.show_errors != "auto":
        return settings.show_errors
    has_keys = settings.predict_keys or settings.metrics_keys or settings.admin_keys
    is_local = is_loopback(settings.host) and not settings.forwarded_allow_ips
    return at_terminal and not has_keys and is_local


def auto_arena_bytes(max_body_bytes: int) -> int:
    """Return the size of an arena for bodies of that size at most, on this host."""
    tenth = _memory_bytes() // 10 // _MIB * _MIB
    return max(2 * max_body_bytes, min(256 * _MIB, tenth))


def _memory_bytes() -> int:
    """Return the memory of this host, or what its control groups allow."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_limits().memory_bytes
    return physical if limit is None else min(physical, limit)
