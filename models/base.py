"""The class that users subclass to serve a model. Runs in worker processes only."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from inferpool.models.attached import attached
from inferpool.models.errors import InputError, ModelError
from inferpool.models.inputs import features_of
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.runtime import (
    Example,
    LoadIsOver,
    NetworkToSplit,
    ReplicaRank,
    Runtime,
    from_runtime,
)
from inferpool.models.spec import ArchiveFacts, Decoding, Placement, TensorSpec, TextFacts
from inferpool.models.tolerance import Tolerance, ValueTolerance

MAX_JSON_NUMBERS = 1 << 24
"""Most numbers in lists: these take 640 MB, and more than may be sent as JSON."""


class ModelInterface:
    """Attributes of `Model` that say how clients speak to it. Settings of these names win."""

    media_types: Sequence[str] = ()
    """Types of the `Content` that `render` or `render_content` returns, such as "image/png": calls
    that accept none of them, and no JSON, are refused before anything is computed."""
    accepts: Literal["", "image", "bytes"] = ""
    """A JSON string in the place of an instance is base64 of a picture or of bytes; if empty, it is
    the text itself."""
    form: Literal["instances", "instance"] = "instances"
    """Each file of a form is an instance; or the whole form is one, as an object of its fields."""
    envelope: bool = True
    """JSON bodies have `instances`, and answers `predictions`. If False, a JSON body is one
    instance as it stands, and the answer is what `render` returned."""
    path: str = ""
    """A path for calls besides `/predict/NAME`, such as "/classify"."""
    joins: bool = False
    """Streams may begin while others are under way: see `models.streams`."""
    _streams_alone: bool = False
    """It yields the parts of one instance: a worker has seen it."""


class Model(ModelInterface):
    """A model to serve. Subclass it, set `inputs` and `outputs`, and write `load` and `forward`.

    Each worker makes one object. The settings' `options` are keywords of `__init__`, which must not
    touch devices.

    Threads: `load`, `forward`, `postprocess` and `render` run in the worker's main thread.
    `preprocess`, `bucket` and `collate` may run in other threads at the same time; `preprocess` and
    `bucket` also several at once, and `collate` if the model `can_run_ahead`. In a pipeline
    `forward` and the methods after it run in several threads, one at a time. While one batch is in
    the call of `network`, other batches are computed: so `forward` must keep nothing on the model
    across that call, and hold no lock. All threads have the context variables and torch settings
    (default device, autocast, ...) that `load` left. Objects bound to the thread that made them,
    such as a sqlite3 connection, work only there.
    """

    inputs: Sequence[TensorSpec] = ()
    """Tensors that clients send and `preprocess` returns, with the batch dimension first. Both are
    checked. If the model's own `preprocess` reads something else, `example` shows clients what."""
    preprocessed: Sequence[TensorSpec] | None = None
    """Tensors that the model's own `preprocess` returns, if these are not `inputs`. An empty list
    leaves them unchecked."""
    example: object = None
    """An instance that people are shown to try: a JSON value, or bytes with their content type, as
    in `(data, "image/jpeg")`. It may be a method that returns one."""
    outputs: Sequence[TensorSpec] = ()
    """Tensors that `postprocess` returns, with the batch dimension first. An instance with outputs
    of another shape fails."""
    labels: Sequence[str] = ()
    """Names of the classes that a classifier tells apart, in the order of its output."""
    text: TextFacts | None = None
    """Facts about a model of texts, for protocols such as OpenAI's; `load` may set it."""
    archive: ArchiveFacts | None = None
    """Facts about a model that is an archive of TorchServe's."""
    finite_outputs: bool = True
    """Outputs have no NaN and no infinity; an instance with one in its outputs fails alone. Set
    it to False if they mean something."""
    repeatable: bool = True
    """The same instance gets the same outputs each time, within `tolerance`. Set it to False if the
    model draws random numbers or keeps a state: a worker checks it before it is ready."""
    alone_as_in_batch: bool = True
    """An instance gets the same outputs alone as beside others, within `tolerance`. Set it to False
    if the batch is meant to change them, as in detectors that pad to the largest picture."""
    _load_flaws: Sequence[str] = ()
    """Reasons why the answers cannot be right that `load` has found: such a model is refused."""
    _makes_samples: bool = False
    """Instances of `warmup` are numbers by chance, so the model may refuse them and be right."""
    max_image_pixels: int = from_runtime()
    """The setting of that name, for `decode_image`."""
    decode: Decoding = from_runtime()
    """How to decode: after `load` one of `fast_decodings`, but only if there are
    `encoded_samples`."""
    prepares_apart: bool = False
    """True if `preprocess` and `warmup` need nothing that `load` sets: then decoders, which build
    the model without loading it, may prepare its instances in processes of their own."""
    can_run_ahead: bool = False
    """`forward` takes a batch on the device or on the CPU, returns new tensors each time, and keeps
    nothing on the model for the methods after it. Then an accelerator gets each batch before it is
    done with the batch before: the worker copies it there in time, and calls `forward` before that
    one's `postprocess`. `collate` then runs in two threads at once. A subclass with a `forward` of
    its own must say so anew."""
    stack_instances: Callable[[list[Tensor]], Tensor] = from_runtime()
    """Stacks tensors, for `collate`: batches for an accelerator in memory that it copies
    from by itself."""
    network: Callable[..., object] | None = None
    """The network that `forward` calls. If `load` sets it to an `nn.Module`, a speed preset may
    replace it with a faster one that takes and returns the same, after a trial on `samples`."""
    has_fixed_shapes: bool = False
    """Inputs of `network` always have the same shapes, except for the batch."""
    tolerance: Tolerance = ValueTolerance()
    """How far outputs may be from each other, after `postprocess`: those of a speed preset from the
    exact ones, and those of an instance alone from those of the same beside others."""
    split_points: Sequence[str] = ()
    """Submodules of the network that begin a new stage of a pipeline, one fewer than there are
    stages. By default the cuts are found. The network's class may have this instead."""
    tensor_plan: Mapping[str, object] | None = None
    """Submodules of the network that are tensor-parallel, and how; `models.split.tensor_plan` lists
    the words. By default it is found. The class of the network may have this attribute instead."""
    ranks: ReplicaRank | None = from_runtime()
    """Processes that this replica is split over, if it is."""
    _runtime: Runtime = Runtime()
    """Values that the worker gives this object. The underscore leaves `runtime` to users' classes:
    those that use TensorRT have one."""

    def load(self, placement: Placement) -> None:
        """Load the weights on the placement's devices, once per incarnation.

        Raises:
            ModelError: The model cannot be loaded, and a restart will not help.
        """

    def load_network(
        self,
        build: Callable[[], nn.Module],
        weights: Path | str | None,
        placement: Placement,
        *,
        example: Example = (),
    ) -> Callable[..., object]:
        """Build a network, load its weights, and put it on the placement's devices in eval mode.

        `load` calls this once. If the replica is split, each rank keeps its own part, and only the
        lead returns from this call. What `build` draws on the CPU is the same in each process, so
        all replicas answer alike without a checkpoint, too. A seed that the model's own code has
        given to torch before is kept.

        Args:
            build: Makes the network, the same one each time.
            weights: A checkpoint to load; None leaves the network as built.
            placement: The argument of `load`.
            example: Arguments that the network will be called with, by position or by name; None
                for one of unknown shape. They are used to balance and verify a split.

        Returns:
            The network, or a callable that computes it with all its parts.

        Raises:
            ModelError: The network cannot be loaded or split.
        """
        runtime = self._runtime
        if runtime.seed in (None, torch.initial_seed()):
            build = partial(_drawn_alike, build)
        if runtime.ranks is None:
            network = build()
            if weights is not None:
                attached("weights")(network, weights)
            return network.eval().requires_grad_(False).to(torch.device(placement.devices[0]))
        if runtime.split_network is not None:
            raise ModelError(
                "a replica that is split has one network: `load_network` is called twice"
            )
        part = runtime.ranks.load(
            NetworkToSplit(
                build=build,
                weights=weights,
                example=example,
                split_points=self.split_points,
                tensor_plan=self.tensor_plan,
            )
        )
        self._runtime = replace(self._runtime, split_network=part)
        if runtime.ranks.rank:
            raise LoadIsOver
        return part

    def preprocess(self, item: Item) -> Features:
        """Turn one instance into CPU tensors without the batch dimension, as `inputs` say.

        Raises:
            InputError: The instance does not fit this model.
        """
        return features_of(item, self.inputs)

    def bucket(self, features: Features) -> Hashable:
        """Name the group within a batch that an instance is computed with; by default one for all.

        A model that pads its instances returns the same value for those of about the same length.
        """
        return None

    def num_tokens(self, features: Features) -> int:
        """Count what an instance adds to a group, padded, for the setting `max_batch_tokens`."""
        return 0

    def collate(self, instances: Sequence[Features]) -> Features:
        """Collate several instances to one batch; by default, stack the tensors of each name.

        If they do not fit together, they are computed in groups that do.

        Raises:
            Exception: The instances do not fit together; by default, for different names, dtypes or
                shapes.
        """
        names = instances[0]
        if len({len(each) for each in instances}) > 1:
            raise ValueError("the instances have not the same tensors")
        stack = self.stack_instances
        return {name: _stacked([each[name] for each in instances], stack) for name in names}

    def forward(self, batch: Features) -> Outputs | Any:
        """Compute a batch under `torch.inference_mode()`; `batch` is on the CPU, maybe pinned.

        If the model `can_run_ahead`, the batch may be on the device.

        Returns:
            Tensors by name, with the batch dimension first. In place of a tensor, a list may have
            one of any shape for each instance. It may also be a list of dicts, one for each
            instance; and for one output just the tensor, or the list of tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(batch)")

    def postprocess(self, outputs: Outputs) -> Outputs | Any:
        """Finish a whole batch on the CPU (scores, thresholds); by default, change nothing.

        An output whose name begins with "_" is for `render` alone: no client gets it as a tensor.
        """
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Turn the outputs of one instance, without the batch dimension, into a JSON value.

        By default that is nested lists: of the only output, or of each output by name. A `Content`
        is sent as it is.

        Raises:
            InputError: A parameter is unknown or out of range.
        """
        num = sum(tensor.numel() for tensor in outputs.values())
        if num > MAX_JSON_NUMBERS:
            raise ValueError(
                f"{num:,} numbers are too many for JSON: ask for tensors (Accept: "
                "application/safetensors), or define `render`"
            )
        lists = {name: tensor.tolist() for name, tensor in outputs.items()}
        return next(iter(lists.values())) if len(lists) == 1 else lists

    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Like `render`, for calls that prefer one of `media_types` over JSON.

        It is for a model that has both forms; by default it is not used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no content besides JSON")

    def render_batch(
        self, outputs: Outputs, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Turn the outputs of a whole batch into JSON values; by default, call `render` for each.

        A class below that overrides `render` alone has that called for each.

        Args:
            outputs: Tensors with the batch dimension first, or lists.
            parameters: Parameters of each instance, in the order of the batch.

        Returns:
            A JSON value for each instance, or an `InputError` that fails this instance alone.
        """
        values: list[object] = []
        for row, wanted in enumerate(parameters):
            try:
                one = {name: tensor[row] for name, tensor in outputs.items()}
                values.append(self.render(one, wanted))
            except InputError as error:
                values.append(error)
        return values

    def warmup(self) -> Sequence[Item]:
        """Return instances to compute before the worker counts as ready; by default none.

        The first is computed again as a health check whenever the worker is idle, if the model has
        no `example`.
        """
        return ()

    def samples(self) -> Sequence[Item]:
        """Return typical instances to try speed presets on; by default those of `warmup`.

        Without any, no preset is tried.
        """
        return self.warmup()

    def encoded_samples(self) -> Sequence[Item]:
        """Return encoded instances to try `decode = "fast"` on; by default none."""
        return ()

    @property
    def fast_decodings(self) -> Sequence[Decoding]:
        """Values of `decode`, besides "exact", that this loaded model knows; each is tried."""
        return ("fast",)


def load_model(model: Model, placement: Placement) -> None:
    """Load a model, or this rank's part of it if the replica is split.

    Raises:
        ModelError: The model cannot be loaded or split.
        EOFError: Another rank has failed.
    """
    try:
        model.load(placement)
    except LoadIsOver:
        return
    runtime = model._runtime
    if runtime.ranks is not None and runtime.split_network is None:
        raise ModelError(
            f"{type(model).__name__} cannot be split: only what `load` loads by `load_network` can"
        )


def _stacked(tensors: list[Tensor], stack: Callable[[list[Tensor]], Tensor]) -> Tensor:
    if len({tensor.dtype for tensor in tensors}) > 1:  # torch would find one that holds them all
        raise ValueError("tensors of one name differ in their dtype")
    return stack(tensors)


def _drawn_alike(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network with the random numbers that each process has for it."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            return build()
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)
