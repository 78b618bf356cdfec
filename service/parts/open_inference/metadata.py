"""Metadata and configuration of models in the protocol's words, which REST and gRPC share.

Field names are those of the Open Inference Protocol, version 2, and of the message `ModelConfig`
of Triton's model_config.proto. Runs in the main process's event loop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from inferpool.models.spec import TensorSpec
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.errors import UnavailableError
from inferpool.service.parts.open_inference.tensors import LOWEST_PRIORITY, wants_tensors
from inferpool.service.parts.open_inference.values import (
    BYTES,
    BYTES_INPUT,
    BYTES_OUTPUT,
    DATATYPES,
)
from inferpool.service.telemetry.versions import version_of

EXTENSIONS = (
    "classification",
    "model_configuration",
    "schedule_policy",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Extensions of the protocol that are always there, by Triton's names."""
OF_REPOSITORY = ("model_repository", "model_repository(unload_dependents)")
"""Those that are there if an operator can load and unload models."""
_PLATFORMS = {
    ".onnx": ("onnxruntime_onnx", "onnxruntime"),
    ".skops": ("sklearn", "sklearn"),
    ".pt": ("pytorch_libtorch", "pytorch"),
    ".ts": ("pytorch_libtorch", "pytorch"),
    ".torchscript": ("pytorch_libtorch", "pytorch"),
}
"""Platforms and backends by the suffix of a source, as Triton and KServe name them."""
USUAL_PRIORITY = 5
"""The priority of a call that asks for none, as of `/predict`."""
_USUAL_PLATFORM = ("pytorch", "pytorch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetadata:
    """The server, and the extensions of the protocol that it has."""

    name: str
    version: str
    extensions: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """One input or output of a model."""

    name: str
    datatype: str
    """`BOOL`, `UINT8` to `UINT64`, `INT8` to `INT64`, `FP16`, `BF16`, `FP32`, `FP64` or `BYTES`."""
    shape: Sequence[int]
    """With the batch first; -1 for any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """A model's versions, inputs and outputs."""

    name: str
    versions: Sequence[str]
    """The versions that calls may name."""
    platform: str
    inputs: Sequence[TensorMetadata]
    """A model of texts, pictures or JSON has one input of `BYTES`."""
    outputs: Sequence[TensorMetadata]
    """A model that answers with JSON has one output of `BYTES`; empty if none is declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTensor:
    """One input or output in a configuration."""

    name: str
    data_type: str
    """The datatype after `TYPE_`; BYTES are `TYPE_STRING`."""
    dims: Sequence[int]
    """The shape without the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestVersions:
    """How many of the latest versions are served."""

    num_versions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """The versions that are served: the one that was swapped in last."""

    latest: LatestVersions = LatestVersions()  # it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """The workers of a model."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """How calls are gathered to batches."""

    max_queue_delay_microseconds: int
    """The setting `batch_wait_ms`."""
    priority_levels: int = LOWEST_PRIORITY
    default_priority_level: int = USUAL_PRIORITY


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPolicy:
    """How many answers a request gets."""

    decoupled: bool
    """Any number: the model answers in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConfig:
    """A model's configuration in Triton's form, as far as this service has what it tells of."""

    name: str
    platform: str
    backend: str
    version_policy: VersionPolicy
    max_batch_size: int
    """The setting of that name. A call may have more instances, which are computed in several."""
    input: Sequence[ConfigTensor]
    output: Sequence[ConfigTensor]
    instance_group: Sequence[InstanceGroup]
    dynamic_batching: DynamicBatching | None
    """Not there for a model that answers in parts."""
    model_transaction_policy: TransactionPolicy


def server_metadata(*, has_repository: bool) -> ServerMetadata:
    """Return what this server is; with a repository, an operator can load and unload models."""
    more = OF_REPOSITORY if has_repository else ()
    return ServerMetadata(name="inferpool", version=version_of(), extensions=[*EXTENSIONS, *more])


def model_metadata(version: ModelVersion, numbers: Iterable[int]) -> ModelMetadata:
    """Return the metadata of a version of a model; `numbers` are all that calls may name.

    Raises:
        UnavailableError: No worker of it has been ready yet, so its tensors are not known.
    """
    inputs, outputs = _tensors_of(version)
    return ModelMetadata(
        name=version.name,
        versions=[str(number) for number in sorted(numbers)],
        platform=_platform_of(version)[0],
        inputs=inputs,
        outputs=outputs,
    )


def model_config(version: ModelVersion) -> ServedConfig:
    """Return the configuration of a version of a model.

    Raises:
        UnavailableError: No worker of it has been ready yet, so its tensors are not known.
    """
    settings, pool = version.settings, version.pool
    inputs, outputs = _tensors_of(version)
    platform, backend = _platform_of(version)
    streams = version.interface.streams
    on_gpu = any(config.placement.visible for config in pool.configs)
    wait_us = round(settings.batch_wait_ms * 1000)
    return ServedConfig(
        name=version.name,
        platform=platform,
        backend=backend,
        version_policy=VersionPolicy(),
        max_batch_size=settings.batch_size,
        input=[_in_config(each) for each in inputs],
        output=[_in_config(each) for each in outputs],
        instance_group=[
            InstanceGroup(
                name=f"{version.name}_0",
                kind="KIND_GPU" if on_gpu else "KIND_CPU",
                count=len(pool.slots),
            )
        ],
        dynamic_batching=None if streams else DynamicBatching(max_queue_delay_microseconds=wait_us),
        model_transaction_policy=TransactionPolicy(decoupled=streams),
    )


def _tensors_of(version: ModelVersion) -> tuple[list[TensorMetadata], list[TensorMetadata]]:
    """Return the inputs and outputs of a version."""
    if version.interface.media_types is None:
        raise UnavailableError(
            f"{version.name} is not ready: {version.pool.reason}", retry_after_s=1
        )
    is_bytes = not version.inputs or bool(version.interface.accepts) or version.pool.reads_own_form
    inputs = [_bytes(BYTES_INPUT)] if is_bytes else [_tensor(each) for each in version.inputs]
    if wants_tensors(version, is_bytes=is_bytes):
        return inputs, [_tensor(each) for each in version.outputs]
    return inputs, [_bytes(BYTES_OUTPUT)]


def _bytes(name: str) -> TensorMetadata:
    return TensorMetadata(name=name, datatype=BYTES, shape=[-1, 1])


def _tensor(spec: TensorSpec) -> TensorMetadata:
    datatype = DATATYPES.get(spec.dtype, spec.dtype.upper())
    return TensorMetadata(name=spec.name, datatype=datatype, shape=[-1, *spec.instance_shape])


def _in_config(tensor: TensorMetadata) -> ConfigTensor:
    data_type = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return ConfigTensor(
        name=tensor.name, data_type=f"TYPE_{data_type}", dims=list(tensor.shape[1:])
    )


def _platform_of(version: ModelVersion) -> tuple[str, str]:
    """Return the platform and the backend of a version."""
    source = version.settings.source
    return next(
        (found for suffix, found in _PLATFORMS.items() if source.endswith(suffix)), _USUAL_PLATFORM
    )
