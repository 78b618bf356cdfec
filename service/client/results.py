"""Results that the clients return: predictions with their timing, and the service's health."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from .contents import ReceivedContent, content_in
from .errors import InferpoolError, ProtocolError, error_class
from .safetensors import RawTensor, read_safetensors
from .tensors import by_output, to_numpy, to_torch

Json: TypeAlias = Any
"""Value that `json.loads` returns; with an exact type, every reader would have to cast."""
ArrayOrList: TypeAlias = Any
"""`np.ndarray`; of a model that returns lists, `list[np.ndarray]`. Readers know which it is."""
TensorOrList: TypeAlias = Any
"""`torch.Tensor`, or `list[torch.Tensor]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Raw answer of the service."""

    status: int
    headers: httpx.Headers
    content: bytes
    response: httpx.Response | None = None
    """The answer itself, if it is a stream that is still open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations in seconds; None if the service did not report one.

    For several instances, each stage is that of the slowest one.
    """

    queue_s: float | None = None
    """Time in the queue, until a worker was free."""
    preprocess_s: float | None = None
    inference_s: float | None = None
    total_s: float | None = None
    """Time in the service, all stages together."""
    round_trip_s: float = 0.0
    """Time of the successful attempt as the client saw it, network included."""
    elapsed_s: float = 0.0
    """Time of the whole call, earlier attempts and pauses included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One label that a classifier suggests."""

    label: str
    score: float
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one input.

    An input may hold several *instances*, such as the rows of a batched tensor. If only some of
    them fail, their errors stand in their places in `predictions`; the client does not retry them.
    """

    predictions: Sequence[Json | InferpoolError]
    """One prediction per instance; empty if arrays were asked for. An answer that is no JSON, such
    as a picture, is its bytes: see `content`."""
    request_id: str
    timing: Timing
    model: str | None = None
    """Name that was asked for; None: the service's default model."""
    version: int | None = None
    """Version of the model that computed it; None if the service did not say."""
    num_attempts: int = 1
    index: int = 0
    """Index of the input in `predict_many`."""
    headers: httpx.Headers = field(default_factory=httpx.Headers, repr=False)
    """Headers of the answer, such as `traceparent`."""
    raw_tensors: Mapping[str, RawTensor] = field(default_factory=dict, repr=False)
    """Bytes behind `arrays` and `tensors`."""

    @property
    def value(self) -> Json:
        """The prediction for the only instance.

        Raises:
            ValueError: There are several instances, or arrays were asked for.
            InferpoolError: It is a stream that failed after its first part; the error has `parts`.
        """
        if len(self.predictions) != 1:
            found = "arrays" if self.raw_tensors else f"{len(self.predictions)} predictions"
            raise ValueError(f"there are {found}, and not one value")
        value = self.predictions[0]
        if isinstance(value, InferpoolError):
            raise value
        return value

    @property
    def content(self) -> ReceivedContent:
        """The only instance's answer as bytes with a `media_type`, such as a picture.

        Raises:
            ValueError: There are several instances, or the model answered with JSON.
        """
        content = content_in(self.value)
        if content is None:
            raise ValueError("the model answered with JSON: see `value`")
        return content

    @property
    def contents(self) -> Sequence[ReceivedContent | InferpoolError]:
        """The `content` of each instance; an error in the place of one that failed.

        Raises:
            ValueError: The model answered with JSON.
        """
        found = [
            each if isinstance(each, InferpoolError) else content_in(each)
            for each in self.predictions
        ]
        contents = [each for each in found if each is not None]
        if len(contents) < len(found):
            raise ValueError("the model answered with JSON: see `predictions`")
        return contents

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the `content` to a file, and return its path.

        Raises:
            ValueError: There is no such content.
            OSError: The file cannot be written.
        """
        return self.content.save(path)

    @property
    def errors(self) -> Sequence[InferpoolError]:
        """Errors of the instances that failed while others succeeded, each with its `index`."""
        return [each for each in self.predictions if isinstance(each, InferpoolError)]

    @property
    def is_whole(self) -> bool:
        """True if no instance failed."""
        return not self.errors

    def raise_for_errors(self) -> "Prediction":
        """Return this prediction if no instance failed.

        Raises:
            InferpoolError: Error of the first instance that failed.
        """
        for error in self.errors:
            raise error
        return self

    @property
    def labels(self) -> list[Label]:
        """Labels of a classifier for the only instance, the best first.

        Raises:
            ValueError: The model is not a classifier.
        """
        value = self.value
        try:
            return [
                Label(label=each["label"], score=each["score"], index=each.get("index"))
                for each in value
            ]
        except (TypeError, KeyError, AttributeError):
            raise ValueError("these are not labels with scores: see `value`") from None

    @property
    def top(self) -> Label:
        """The best label of a classifier.

        Raises:
            ValueError: The model is not a classifier.
        """
        labels = self.labels
        if not labels:
            raise ValueError("there are no labels: see `value`")
        return labels[0]

    @cached_property
    def arrays(self) -> dict[str, ArrayOrList]:
        """Outputs by name, if `as_arrays` asked for them; bfloat16 becomes float32.

        Of a model that returns lists, an output is a list with an array for each instance.
        """
        return by_output(self._tensors(), to_numpy)

    @property
    def array(self) -> ArrayOrList:
        """The only output, if `as_arrays` asked for it."""
        return self.arrays[_only(self.arrays)]

    @cached_property
    def tensors(self) -> dict[str, TensorOrList]:
        """Outputs by name as CPU tensors, if `as_arrays` asked for them; lists as in `arrays`."""
        return by_output(self._tensors(), to_torch)

    @property
    def tensor(self) -> TensorOrList:
        """The only output as a CPU tensor, if `as_arrays` asked for it."""
        return self.tensors[_only(self.tensors)]

    def _tensors(self) -> Mapping[str, RawTensor]:
        if not self.raw_tensors:
            raise ValueError("ask with as_arrays=True")
        return self.raw_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """One tensor that a model takes."""

    name: str
    dtype: str
    shape: Sequence[int]
    """Shape with the batch dimension first; -1 for any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """State of one worker."""

    name: str
    state: str
    device: str
    reason: str
    """Reason why the worker is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """State of one model."""

    name: str
    is_ready: bool
    reason: str
    """Reason why the model is not ready."""
    queue_depth: int
    """Instances in the queue."""
    inputs: Sequence[InputInfo]
    """Tensors that the model takes; empty if it does not say."""
    example: Json
    """An instance that the model takes, or None."""
    workers: Sequence[WorkerInfo]
    envelope: bool = True
    """False if its JSON bodies and answers stand as they are: ask with `envelope=False`."""
    path: str = ""
    """Its own path, besides `/predict/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of the service."""

    status: str
    """`starting`, `ready`, `degraded`, `unavailable` or `draining`."""
    is_ready: bool
    is_draining: bool
    models: Sequence[ModelInfo]
    document: Json = field(repr=False)
    """The whole answer of `GET /health`."""


def read_prediction(
    reply: Reply,
    *,
    model: str | None,
    envelope: bool = True,
    request_id: str,
    num_attempts: int,
    timing: Timing,
) -> Prediction:
    """Read an answer of status 200; without `envelope` it is the only prediction.

    Raises:
        ProtocolError: The answer is not one of inferpool's.
    """
    predictions: list[Json] = []
    tensors: Mapping[str, RawTensor] = {}
    media_type = reply.headers.get("content-type", "")
    if media_type.startswith("application/safetensors"):
        tensors = read_safetensors(reply.content)
    elif _version_in(reply.headers) and not media_type.startswith("application/json"):
        predictions = [ReceivedContent(reply.content, media_type)]
    else:
        predictions = _read_predictions(reply.content, request_id, envelope=envelope)
    return Prediction(
        predictions=predictions,
        request_id=reply.headers.get("x-request-id", request_id),
        timing=timing,
        model=model,
        version=_version_in(reply.headers),
        num_attempts=num_attempts,
        headers=reply.headers,
        raw_tensors=tensors,
    )


def read_stages(headers: httpx.Headers) -> dict[str, float]:
    """Read `Server-Timing`: seconds by the name of a stage."""
    stages = {}
    for entry in headers.get("server-timing", "").split(","):
        name, *options = (part.strip() for part in entry.split(";"))
        for option in options:
            key, _, value = option.partition("=")
            try:
                if key == "dur":
                    stages[name] = float(value) / 1e3
            except ValueError:
                continue
    return stages


def read_instance_error(error: Json, index: int, request_id: str) -> InferpoolError | None:
    """Read the error of one instance; None if this does not describe an error."""
    match error:
        case {"code": str(code), "message": str(message), "status": int(status), **rest}:
            given = rest.get("index")
            place = given if isinstance(given, int) else index
            cls = error_class(code, status)
            return cls(message, code=code, status=status, request_id=request_id, index=place)
    return None


def read_health(reply: Reply) -> Health:
    """Read the answer of `GET /health`.

    Raises:
        ProtocolError: The answer is not one of inferpool's.
    """
    try:
        document = json.loads(reply.content)
        return Health(
            status=document["status"],
            is_ready=document["ready"],
            is_draining=document["draining"],
            models=[_read_model(each) for each in document["models"]],
            document=document,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"this is not inferpool's /health: {error!r}") from None


def _read_model(model: Json) -> ModelInfo:
    inputs = [
        InputInfo(name=each["name"], dtype=each["dtype"], shape=tuple(each["shape"]))
        for each in model["inputs"]
    ]
    keys = ("name", "state", "device", "reason")
    return ModelInfo(
        name=model["name"],
        is_ready=model["ready"],
        reason=model["reason"],
        queue_depth=model["queue_depth"],
        inputs=inputs,
        example=model["example"],
        envelope=model.get("interface", {}).get("envelope", True),
        path=model.get("interface", {}).get("path", ""),
        workers=[WorkerInfo(**{key: each[key] for key in keys}) for each in model["workers"]],
    )


def _read_predictions(content: bytes, request_id: str, *, envelope: bool) -> list[Json]:
    try:
        if not envelope:
            return [json.loads(content)]
        values = json.loads(content)["predictions"]
        if not isinstance(values, list):
            raise TypeError("predictions is not a list")
    except (ValueError, KeyError, TypeError, RecursionError):
        start = content[:200].decode("utf-8", "replace")
        raise ProtocolError(
            f"this is not an answer of inferpool's: {start!r}", request_id=request_id
        ) from None
    if len(values) == 1 and not _is_broken(values[0]):
        return values  # any other failed only instance has no status 200, so this is no error
    return [_instance_error(value, i, request_id) or value for i, value in enumerate(values)]


def _instance_error(value: Json, index: int, request_id: str) -> InferpoolError | None:
    if not isinstance(value, dict) or not (set(value) == {"error"} or _is_broken(value)):
        return None
    error = read_instance_error(value["error"], index, request_id)
    if error is not None:
        error.parts = value.get("parts", ())
    return error


def _is_broken(value: Json) -> bool:
    """Return whether this is a stream that failed after some parts."""
    return isinstance(value, dict) and set(value) == {"error", "parts"}


def _version_in(headers: httpx.Headers) -> int | None:
    text = headers.get("x-model-version", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _only(names: Collection[str]) -> str:
    if len(names) != 1:
        raise ValueError(f"there are {sorted(names)}: choose from `arrays` or `tensors`")
    return next(iter(names))
