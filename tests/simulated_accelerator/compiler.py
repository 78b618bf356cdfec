"""Stands in for torch's compiler on simulated devices: a package is the pickled network."""

import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Compiler:
    """Compiles nothing, and keeps what `inferpool.models.speed.compiled:Inductor` keeps."""

    def compile(
        self, network: nn.Module, inputs: Sequence[Tensor], path: Path, scratch: Path, forms: str
    ) -> None:
        """Write the network to a file; fail for inputs of the dtype in SIM_COMPILER_FAILS."""
        assert scratch.is_dir()
        if str(inputs[0].dtype) == os.environ.get("SIM_COMPILER_FAILS"):
            raise RuntimeError("a kernel is too large")
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
            return pytree.tree_leaves(network(*inputs))

        return run, partial(pytree.tree_unflatten, treespec=spec), forms
