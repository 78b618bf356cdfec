"""What a user writes to serve a model: a subclass of `Model`. Runs in worker processes only."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from inferpool.models.agreement import Tolerance, ValueTolerance
from inferpool.models.errors import InputError, ModelError
from inferpool.models.inputs import features_of
from inferpool.models.item import Features, Item
from inferpool.models.spec import MAX_IMAGE_PIXELS, Placement, TensorSpec
from inferpool.models.split.network import LoadIsOver, SplitNetwork, load_part, load_whole
from inferpool.models.split.ranks import NetworkToSplit, Ranks
from inferpool.models.split.report import SplitReport

MAX_JSON_NUMBERS = 1 << 24
"""So many numbers take 640 MB as lists, and more than may be sent as JSON."""


class Model:
    """A model to serve. Subclass it, set `inputs` and `outputs`, and write `load` and `forward`.

    One object lives for one incarnation of a worker. `load`, `forward`, `postprocess` and `render`
    run in the worker's main thread; `preprocess`, `bucket` and `collate` may run in other threads
    at the same time, the first two several at once. Of a pipeline, `forward` and what follows it
    run in several threads, and still never two at a time: but while one batch is in the call of
    its network, others are computed, so that `forward` must leave nothing on the model for after
    that call, and hold no lock in it. All these threads have torch's settings as `load` left them
    in its own (`torch.set_default_device`, autocast, ...) and its context variables; what belongs
    to the one thread that made it, such as a connection of sqlite3, is for that alone. The keyword
    options of the settings go to `__init__`, which must not touch devices.
    """

    inputs: Sequence[TensorSpec] = ()
    """What clients send and `preprocess` yields, with the batch dimension first; both are checked.
    A `preprocess` of the model's own may read something else: `example` shows clients what."""
    preprocessed: Sequence[TensorSpec] | None = None
    """What a `preprocess` of the model's own yields, where `inputs` say only what clients send;
    empty leaves it unchecked."""
    example: object = None
    """An instance that the model takes, which people are shown to try: what JSON can say, or bytes
    with their content type, as in `(data, "image/jpeg")`. It may be a method that returns it."""
    outputs: Sequence[TensorSpec] = ()
    """What `postprocess` yields, with the batch dimension first: an instance whose outputs have
    another shape fails."""
    finite_outputs: bool = True
    """A promise: what `postprocess` yields has no NaN and no infinity in it. An instance whose
    outputs have fails, and its neighbours succeed. Set it to False where they mean something."""
    max_image_pixels = MAX_IMAGE_PIXELS
    """The setting of that name, for `decode_image`; set by the worker before `load`."""
    decode: Literal["exact", "fast"] = "exact"
    """How `preprocess` is to decode; set by the worker after `load`, to "fast" only where there are
    `encoded_samples`."""
    network: Callable[..., object] | None = None
    """What `forward` calls to compute. If `load` sets it to an `nn.Module`, a speed preset may put
    a faster one in its place, which takes and returns the same and is tried on `samples`."""
    has_fixed_shapes: bool = False
    """A promise: `network` is called with inputs of the same shapes always, but for the batch."""
    tolerance: Tolerance = ValueTolerance()
    """How far a preset's outputs may be from the exact ones, after `postprocess`."""
    split_points: Sequence[str] = ()
    """Submodules of the network in front of which a pipeline is cut, one fewer than its stages; by
    default the cuts are found. The class of the network may have this attribute instead."""
    tensor_plan: Mapping[str, object] | None = None
    """Submodules of the network that are tensor-parallel, and how; `models.split.tensor_plan` lists
    the words. By default it is found. The class of the network may have this attribute instead."""
    ranks: Ranks | None = None
    """The processes that this replica is split over, if it is; set by the worker before `load`."""
    known_split: SplitReport | None = None
    """How an earlier incarnation was split, and found to compute the same as the whole; set by the
    worker before `load`."""
    room_bytes: int = 0
    """What this rank may take of its device's memory, or 0 where that is not known; set by the
    worker before `load`."""
    split_network: SplitNetwork | None = None
    """This rank's part, after `load_network`; None if the model is not split."""

    def load(self, placement: Placement) -> None:
        """Load the weights on the placement's devices, once per incarnation.

        Raises:
            ModelError: The model cannot be had, and a restart will not help.
        """

    def load_network(
        self,
        build: Callable[[], nn.Module],
        weights: Path | str | None,
        placement: Placement,
        *,
        example: Sequence[Tensor | None] | Mapping[str, Tensor | None] = (),
    ) -> Callable[..., object]:
        """Build a network, read its weights and lay it on the placement's devices, to infer.

        To be called once, by `load`. If the replica is split, each rank keeps its own part, and
        only the lead gets further than this: what comes after it runs there alone.

        Args:
            build: Makes the network, the same one each time.
            weights: A checkpoint to load into it; None leaves it as built.
            placement: As `load` was given it.
            example: What it will be called with, by position or by name: where the cuts of a
                pipeline are found by trial, and which of its optional arguments are given. None
                for an argument whose shape is not known.

        Returns:
            The network, or what calls all its parts.

        Raises:
            ModelError: It cannot be had, or cannot be split.
        """
        if self.ranks is None:
            return load_whole(build, weights, placement)
        if self.split_network is not None:
            raise ModelError(
                "a replica that is split has one network: `load_network` is called twice"
            )
        network = NetworkToSplit(
            build=build,
            weights=weights,
            example=example,
            split_points=self.split_points,
            tensor_plan=self.tensor_plan,
            known=self.known_split,
            room_bytes=self.room_bytes,
        )
        self.split_network = load_part(self.ranks, network)
        if self.ranks.rank:
            raise LoadIsOver
        return self.split_network

    def preprocess(self, item: Item) -> Features:
        """Turn one instance into CPU tensors without the batch dimension, checked against `inputs`.

        Raises:
            InputError: The instance does not fit this model.
        """
        return features_of(item, self.inputs)

    def bucket(self, features: Features) -> Hashable:
        """Name the group that an instance is computed in: those of a batch that share a name.

        By default there is one for all. A model that pads its instances names those of about the
        same length alike.
        """
        return None

    def collate(self, instances: Sequence[Features]) -> Features:
        """Make one batch of several instances: by default each name's tensors are stacked.

        Instances that do not go together are computed in groups that do.

        Raises:
            Exception: They do not go together: by default, for other names, dtypes or shapes.
        """
        names = instances[0]
        if len({len(each) for each in instances}) > 1:
            raise ValueError("the instances have not the same tensors")
        return {name: _stacked([each[name] for each in instances]) for name in names}

    def forward(self, batch: Features) -> Features:
        """Compute a batch, under `torch.inference_mode()`. `batch` is on the CPU, maybe pinned."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(batch)")

    def postprocess(self, outputs: Features) -> Features:
        """Finish a whole batch, on the CPU: scores, thresholds. By default it is left as it is."""
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        """Say one instance's outputs (without the batch dimension) as a JSON value.

        By default nested lists: of the only output, or of each by its name.

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

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render a whole batch: by default each instance by `render`, for those that need no more.

        Args:
            outputs: With the batch dimension first.
            parameters: Of each instance, in the order of the batch.

        Returns:
            A JSON value for each instance, or an `InputError` that fails that instance alone.
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
        """Sample instances that are computed before the worker counts as ready; by default none.

        The first is computed again whenever an idle worker must prove that it is well.
        """
        return ()

    def samples(self) -> Sequence[Item]:
        """Instances like those to come, on which speed presets are tried; by default `warmup`'s.

        Without any, the model is served as it is.
        """
        return self.warmup()

    def encoded_samples(self) -> Sequence[Item]:
        """Instances on which `decode = "fast"` is tried; none where there is no such way."""
        return ()


def load_model(model: Model, placement: Placement) -> None:
    """Load a model, or this rank's part of it if `model.ranks` is set.

    Raises:
        ModelError: It cannot be had, or cannot be split.
        EOFError: Another rank has failed.
    """
    try:
        model.load(placement)
    except LoadIsOver:
        return
    if model.ranks is not None and model.split_network is None:
        raise ModelError(
            f"{type(model).__name__} cannot be split: only what `load` loads by `load_network` can"
        )


def _stacked(tensors: list[Tensor]) -> Tensor:
    if len({tensor.dtype for tensor in tensors}) > 1:  # torch would find one that holds them all
        raise ValueError("tensors of one name differ in their dtype")
    return torch.stack(tensors)
