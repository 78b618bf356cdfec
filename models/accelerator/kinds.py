"""The kinds of accelerator that replicas run on. Imports no torch: the front end uses it too.

CUDA is built in. Another package adds a kind with an entry point of the group
`inferpool.accelerators`, which is read like those of `torch.backends`: its name is the kind, and it
refers to an `Accelerator`. The tests add a simulated accelerator in this way.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

logger = logging.getLogger(__name__)

_GROUP = "inferpool.accelerators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Names that belong to one kind of accelerator."""

    kind: str
    """Device type of torch: "cuda" in "cuda:0". The same stands in the users' settings."""
    visible: str
    """Environment variable that limits a process to some devices, which are named by UUID."""
    management: str
    """Module with the functions of NVML, which describes devices without using them."""
    collectives: str
    """Backend of `torch.distributed` for transfers between two of these devices."""
    decode_jpeg: str = ""
    """Function ("module:name") that decodes JPEGs on the device like `torchvision.io.decode_jpeg`;
    empty if there is none."""
    transform_pictures: str = ""
    """Function ("module:name") that makes a network's input of pictures on the device, like
    `inferpool.models.vision.one_launch:transform`; empty if there is none."""
    fused_convolution: str = ""
    """Function ("module:name") that computes relu(convolution + bias + other) in one kernel, like
    `inferpool.models.speed.fused:cudnn_convolution`; empty if there is none."""
    compiler: str = ""
    """Class ("module:name") that compiles networks for the device ahead of time, like
    `inferpool.models.speed.compiled:Inductor`; empty if there is none."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further variables that a process needs before it uses a device."""
    split_environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables that each process of a split replica needs beside these."""

    @property
    def library(self) -> Any:
        """The module that `management` names."""
        return import_module(self.management)


CUDA = Accelerator(
    kind="cuda",
    visible="CUDA_VISIBLE_DEVICES",
    management="pynvml",
    collectives="nccl",
    decode_jpeg="torchvision.io:decode_jpeg",
    transform_pictures="inferpool.models.vision.one_launch:transform",
    fused_convolution="inferpool.models.speed.fused:cudnn_convolution",
    compiler="inferpool.models.speed.compiled:Inductor",
    environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    split_environment={
        # To load a kernel at its first launch, CUDA may wait for all kernels that run; one that
        # sends runs until another rank receives, which may be loading too (CUDA Programming Guide,
        # "Lazy Loading", "Concurrent Execution").
        "CUDA_MODULE_LOADING": "EAGER",
        # No transfer waits for another one of its group: see `workers.ranks.group`.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    },
)


@cache
def known_accelerators() -> Sequence[Accelerator]:
    """Return all kinds that can be loaded. Added ones come first, as in torch."""
    added: list[Accelerator] = []
    for point in entry_points(group=_GROUP):
        try:
            added.append(point.load())
        except Exception:  # code of another package may raise anything
            text = "the accelerator %r cannot be used: mend or remove the package that adds %s"
            logger.exception(text, point.name, point.value)
    return *added, CUDA


def accelerator_of(device: str) -> Accelerator | None:
    """Return the kind of a device ("cuda", "cuda:0"); None for the CPU and unknown kinds."""
    kind = device.partition(":")[0]
    if kind in ("cpu", CUDA.kind):
        return CUDA if kind == CUDA.kind else None
    return next((each for each in known_accelerators() if each.kind == kind), None)
