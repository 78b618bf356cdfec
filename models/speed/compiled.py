"""Networks compiled to machine code once, and loaded in a moment after that. Worker processes only.

Compiling (`compile_network`) imports much and takes a minute; it has a process of its own. Loading
(`Compiled`) needs neither the compiler nor torch's Python part of it.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inferpool.models.speed.presets import prepare

_MADE_OF = {"compiled": "folded", "compiled_bf16": "bf16"}
"""The preset whose network is compiled."""
_FORMS = "inputs"


class Compiled(nn.Module):
    """Calls a package that `compile_network` wrote."""

    memory_format = torch.channels_last
    """What inputs are best made in."""

    def __init__(self, path: Path, exact: nn.Module | None = None) -> None:
        """Load it.

        Args:
            path: The package.
            exact: What to call with inputs of other shapes than it was compiled for; None promises
                that there will be none.

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
        self._forms = json.loads(self._loader.get_metadata()[_FORMS])
        self._exact = exact

    def forward(self, *inputs: Tensor) -> object:
        """Compute a batch of any size."""
        # The package itself looks at neither shapes nor strides: it would read past the end.
        if _forms(inputs) != self._forms:
            if self._exact is None:
                raise ValueError(f"compiled for {self._forms}, called with {_forms(inputs)}")
            return self._exact(*inputs)
        outputs = self._loader.boxed_run([_laid_out(x) for x in inputs])
        return pytree.tree_unflatten(outputs, self._out_spec)


def can_compile() -> bool:
    """Whether there is a C++ compiler, as torch looks for it."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_network(
    network: nn.Module,
    run: Callable[[nn.Module], object],
    preset: str,
    path: Path,
    scratch: Path,
) -> None:
    """Compile a network on the CPU, for batches of any size.

    Args:
        network: In eval mode, without gradients.
        run: Calls the network that it is given with a batch of two or more samples.
        preset: One of `names.COMPILED`.
        path: The package to write.
        scratch: A folder for what is left over.
    """
    import torch._inductor.config as inductor

    # No pool of compiling processes, which would outlive a killed one of ours.
    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
    changed = prepare(_MADE_OF[preset], network, run)
    inputs = _inputs(network, run)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(
            changed, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),)
        )
        draft = scratch / "package.pt2"
        # Freezing folds what depends on weights alone, and lays these out for the kernels.
        configs = {
            "freezing": True,
            "aot_inductor.metadata": {_FORMS: json.dumps(_forms(inputs))},
        }
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(draft), inductor_configs=configs
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
    # Those made in inference mode cannot be exported.
    return tuple(_laid_out(x.clone()) for x in seen[0])


def _laid_out(x: Tensor) -> Tensor:
    """An input in the one layout that a package reads."""
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format
    )


def _forms(inputs: Sequence[Tensor]) -> list[list[object]]:
    """What a package depends on of each input: all but the size of the batch."""
    return [[str(x.dtype), *x.shape[1:]] for x in inputs]
