"""Networks compiled to machine code once, and loaded in a moment after that. Worker processes only.

Compiling (`compile_network`) imports much and takes a minute; it has a process of its own. Loading
(`Compiled`) needs neither the compiler nor torch's Python part of it.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from models.speed.presets import Recast


class Compiled(nn.Module):
    """Calls a package that `compile_network` wrote."""

    memory_format = torch.channels_last
    """What inputs are best made in."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            PermissionError: Others than this user could have written it, and it is code.
        """
        super().__init__()
        for each in (path, path.parent):
            status = each.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(f"{each} could have been written by others")
        # torch._inductor.aoti_load_package does the same, but imports the compiler for it.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        _, self._out_spec = map(pytree.treespec_loads, self._loader.get_call_spec())

    def forward(self, *inputs: Tensor) -> object:
        """Compute a batch of any size."""
        outputs = self._loader.boxed_run(list(inputs))
        return pytree.tree_unflatten(outputs, self._out_spec)


def can_compile() -> bool:
    """Whether there is a C++ compiler, as torch looks for it."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_network(
    network: nn.Module, run: Callable[[nn.Module], object], path: Path, scratch: Path
) -> None:
    """Compile a network on the CPU, for batches of any size.

    Args:
        network: In eval mode, without gradients.
        run: Calls the network that it is given with a batch of two or more.
        path: The package to write.
        scratch: A folder for what is left over.
    """
    import torch._inductor.config as inductor

    # No pool of compiling processes, which would outlive a killed one of ours.
    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
    changed = Recast(
        deepcopy(network).to(memory_format=torch.channels_last),
        torch.float32,
    ).eval()
    inputs = _inputs(network, run)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(
            changed, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),)
        )
        draft = scratch / "package.pt2"
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(draft), inductor_configs={"freezing": True}
        )
    draft.chmod(0o600)
    draft.replace(path)


def _inputs(network: nn.Module, run: Callable[[nn.Module], object]) -> tuple[Tensor, ...]:
    """What the network is called with."""
    seen: list[Sequence[Tensor]] = []

    def before(module: nn.Module, inputs: Sequence[Tensor]) -> None:
        seen.append(inputs)

    hook = network.register_forward_pre_hook(before)
    try:
        run(network)
    finally:
        hook.remove()
    return tuple(x.clone() for x in seen[0])  # those made in inference mode cannot be exported
