"""Stands in for torch's compiler on simulated devices, which it cannot compile for.

A package is the pickled network. Its convolutions take no time of the device, so that it is faster
than all presets where `SIM_DURATIONS_US` says that convolutions take some.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_CONVOLUTION = "aten::convolution_overrideable"


class Compiler:
    """Compiles nothing, and keeps what `inferpool.models.speed.compiled:Inductor` keeps."""

    def compile(
        self, network: nn.Module, inputs: Sequence[Tensor], path: Path, scratch: Path, forms: str
    ) -> None:
        """Write the network to a file. SIM_COMPILER_FAILS has it fail with that text."""
        assert scratch.is_dir()
        if text := os.environ.get("SIM_COMPILER_FAILS"):
            raise RuntimeError(text)
        with torch.no_grad():
            network(*inputs)
        torch.sim.synchronize()
        path.write_bytes(pickle.dumps((network.cpu(), forms)))

    def load(
        self, path: Path, device: torch.device
    ) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Callable[..., object], str]:
        """Load the network from a file."""
        network, forms = pickle.loads(path.read_bytes())  # noqa: S301  # it has been written here
        network = network.to(device)
        _, spec = pytree.tree_flatten(0)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            with _quick_convolutions():
                return pytree.tree_leaves(network(*inputs))

        return run, partial(pytree.tree_unflatten, treespec=spec), forms


@contextmanager
def _quick_convolutions() -> Iterator[None]:
    usual = json.loads(os.environ.get("SIM_DURATIONS_US") or "{}").get(_CONVOLUTION, 0)
    torch.sim.set_duration_us(_CONVOLUTION, 0)
    try:
        yield
    finally:
        torch.sim.set_duration_us(_CONVOLUTION, usual)
