"""What a prediction came to, and where its time went."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx

from inferpool.service.client.errors import InferpoolError, ProtocolError, error_class
from inferpool.service.client.safetensors import Tensor, read_safetensors
from inferpool.service.client.tensors import to_numpy, to_torch

if TYPE_CHECKING:
    import numpy as np
    import torch

Json: TypeAlias = Any
"""What `json.loads` returns: an exact type would have every reader cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it came."""

    status: int
    headers: httpx.Headers
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time went, in seconds; what the service did not say is None.

    Of several instances it says the longest of each stage.
    """

    queue_s: float | None = None
    """Waiting for a worker."""
    preprocess_s: float | None = None
    inference_s: float | None = None
    total_s: float | None = None
    """All that the service took."""
    round_trip_s: float = 0.0
    """As the client saw it: the attempt that succeeded, with the network."""
    elapsed_s: float = 0.0
    """With earlier attempts and the pauses between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One guess of a classifier."""

    label: str
    score: float
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model said of one input.

    An input may hold several *instances*, such as the rows of a batched tensor. Where some of them
    failed, their errors stand in their places in `predictions`; they were not tried again.
    """

    predictions: Sequence[Json | InferpoolError]
    """Of each instance; empty if arrays were asked for."""
    request_id: str
    timing: Timing
    model: str | None = None
    """As asked for; None: the service's default."""
    num_attempts: int = 1
    index: int = 0
    """Of the input, in `predict_many`."""
    headers: httpx.Headers = field(default_factory=httpx.Headers, repr=False)
    """Of the answer, `traceparent` among them."""
    raw_tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """What `arrays` and `tensors` are made of."""

    @property
    def value(self) -> Json:
        """What the model said of the only instance.

        Raises:
            InferpoolError: This instance failed.
            ValueError: There are several, or arrays were asked for.
        """
        if len(self.predictions) != 1:
            found = "arrays" if self.raw_tensors else f"{len(self.predictions)} predictions"
            raise ValueError(f"there are {found}, and not one value")
        return self.predictions[0]

    @property
    def errors(self) -> Sequence[InferpoolError]:
        """Of the instances that failed while others succeeded, each with its `index`."""
        return [each for each in self.predictions if isinstance(each, InferpoolError)]

    @property
    def is_whole(self) -> bool:
        """Whether no instance failed."""
        return not self.errors

    def raise_for_errors(self) -> "Prediction":
        """Return this very prediction, if no instance failed.

        Raises:
            InferpoolError: Of the first that did.
        """
        for error in self.errors:
            raise error
        return self

    @property
    def labels(self) -> list[Label]:
        """The guesses of a classifier for the only instance, the best first.

        Raises:
            ValueError: The model is no classifier.
        """
        value = self.value
        try:
            return [
                Label(label=each["label"], score=each["score"], index=each.get("index"))
                for each in value
            ]
        except (TypeError, KeyError, AttributeError):
            raise ValueError("these are no labels with scores: see `value`") from None

    @property
    def top(self) -> Label:
        """The best guess of a classifier.

        Raises:
            ValueError: The model is no classifier.
        """
        labels = self.labels
        if not labels:
            raise ValueError("there are no labels: see `value`")
        return labels[0]

    @cached_property
    def arrays(self) -> "dict[str, np.ndarray[Any, Any]]":
        """The outputs by name, if `as_arrays` asked for them; bfloat16 becomes float32."""
        return {name: to_numpy(each) for name, each in self._tensors().items()}

    @property
    def array(self) -> "np.ndarray[Any, Any]":
        """The only output, if `as_arrays` asked for it."""
        return self.arrays[_only(self.arrays)]

    @cached_property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The outputs by name as CPU tensors, if `as_arrays` asked for them."""
        return {name: to_torch(each) for name, each in self._tensors().items()}

    @property
    def tensor(self) -> "torch.Tensor":
        """The only output as a CPU tensor, if `as_arrays` asked for it."""
        return self.tensors[_only(self.tensors)]

    def _tensors(self) -> Mapping[str, Tensor]:
        if not self.raw_tensors:
            raise ValueError("ask with as_arrays=True")
        return self.raw_tensors


def prediction_of(
    reply: Reply, *, model: str | None, request_id: str, num_attempts: int, timing: Timing
) -> Prediction:
    """Read an answer of status 200.

    Raises:
        ProtocolError: It is none of inferpool's.
    """
    predictions: list[Json] = []
    tensors: Mapping[str, Tensor] = {}
    if reply.headers.get("content-type", "").startswith("application/safetensors"):
        tensors = read_safetensors(reply.content)
    else:
        predictions = _predictions(reply.content, request_id)
    return Prediction(
        predictions=predictions,
        request_id=reply.headers.get("x-request-id", request_id),
        timing=timing,
        model=model,
        num_attempts=num_attempts,
        headers=reply.headers,
        raw_tensors=tensors,
    )


def stages_of(headers: httpx.Headers) -> dict[str, float]:
    """Seconds by name, from `Server-Timing`."""
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


def _predictions(content: bytes, request_id: str) -> list[Json]:
    try:
        values = json.loads(content)["predictions"]
        if not isinstance(values, list):
            raise TypeError("predictions is no list")
    except (ValueError, KeyError, TypeError, RecursionError):
        start = content[:200].decode("utf-8", "replace")
        raise ProtocolError(
            f"this is no answer of inferpool's: {start!r}", request_id=request_id
        ) from None
    if len(values) == 1:  # were it an error, all had failed, and there would be no 200
        return values
    return [_failure(value, i, request_id) or value for i, value in enumerate(values)]


def _failure(value: Json, index: int, request_id: str) -> InferpoolError | None:
    """The error that stands in the place of an instance, if this is one."""
    if not isinstance(value, dict) or set(value) != {"error"}:
        return None
    return instance_error(value["error"], index, request_id)


def instance_error(error: Json, index: int, request_id: str) -> InferpoolError | None:
    """Read why one instance has no prediction; None if this does not say it."""
    match error:
        case {"code": str(code), "message": str(message), "status": int(status), **rest}:
            given = rest.get("index")
            place = given if isinstance(given, int) else index
            cls = error_class(code, status)
            return cls(message, code=code, status=status, request_id=request_id, index=place)
    return None


def _only(names: Collection[str]) -> str:
    if len(names) != 1:
        raise ValueError(f"there are {sorted(names)}: choose from `arrays` or `tensors`")
    return next(iter(names))
