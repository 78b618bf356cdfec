"""The numbers that decide a training run, none of them left open. No torch."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from inferpool.models.files.run_folder import TransformCard

Augmentation = Literal["none", "shift", "crop", "trivial", "randaugment", "autoaugment"]
"""Names of the augmentations of `models.training.augment`."""
Precision = Literal["fp32", "bf16"]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that the ranks of a run need to know besides the images: `recipe.json`."""

    model: str
    """`torchvision:NAME`, `efficientnet_lite0`, or `package.module:Class` of an `nn.Module` whose
    constructor takes `num_classes`, and whose forward turns float32 [B, 3, crop, crop] into logits
    [B, K]."""
    weights: str
    """`DEFAULT`, a name that torchvision knows, a checkpoint's path, or `none`."""
    options: Mapping[str, object]
    """Keyword arguments of the network's builder, besides the number of classes."""
    labels: Sequence[str]
    transform: TransformCard
    data: str = ""
    """The images, as the command named them, for the card."""
    command: str = ""
    """The command line, for the card."""
    dataset: str = ""
    """`package.module:Class` of the user's dataset; empty if the images are files."""
    dataset_options: Mapping[str, object] = {}
    epochs: int
    head_only_epochs: int
    """First epochs, which train only the last layer."""
    batch_size: int
    """Images of one optimizer step, over all ranks."""
    accumulate: int = 1
    """Forward passes of each rank for one step."""
    learning_rate: float
    """Highest rate, after the warm-up; then it falls to 0 along half a cosine."""
    warmup: float
    """Share of the steps in which the rate rises from 0."""
    weight_decay: float
    """Decay of weights with two or more axes; biases and norms have none."""
    label_smoothing: float
    ema_decay: float
    """Decay of the moving average of weights, per step; 0 for no average."""
    class_weights: Sequence[float] | None = None
    """Weight of each class in the loss; None for equal ones."""
    augment: Augmentation
    flip: bool
    """True if images are mirrored left to right at random."""
    freeze_norm: bool = False
    """True if the statistics of batch norms stay as they were loaded."""
    sync_batchnorm: bool = False
    """True if batch norms use the statistics of all ranks; on GPUs only."""
    precision: Precision
    channels_last: bool
    seed: int
    num_workers: int
    """Processes of each rank that read images ahead; 0 for none."""
    checkpoint_minutes: float
    device: str
    """Kind of the ranks' devices: `cpu`, or one that `models.accelerator` knows, such as `cuda`."""
    devices: Sequence[int] = ()
    """Indices of the devices of this host, one for each of its ranks; empty on CPUs."""
    threads: int
    """Threads of torch in each rank."""
    is_idle: bool
    """True if ranks run only on cores that nobody else wants (SCHED_IDLE of Linux)."""
    tensorboard: bool = True
    """True to write event files for TensorBoard, if tensorboardX is installed."""
