"""Networks compiled to machine code once, then loaded in a moment. Worker processes only.

Compiling (`compile_network`) takes a minute and imports much, so it has a process of its own.
Loading (`Compiled`) needs neither the compiler nor torch's Python code for it.
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
"""The preset that gives each compiled preset its network."""
_FORMS = "inputs"


class Compiled(nn.Module):
    """A network in a package that `compile_network` wrote."""

    memory_format = torch.channels_last
    """Best layout of inputs."""

    def __init__(self, path: Path, exact: nn.Module | None = None) -> None:
        """Load the package.

        Args:
            path: Path of the package.
            exact: Network for inputs of shapes other than the compiled ones; None if there are
                none.

        Raises:
            PermissionError: Other users could have written the package, which is code.
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
    """Return whether there is a C++ compiler, found as torch finds it."""
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
        run: Calls the given network with a batch of two or more samples.
        preset: One of `speed_names.COMPILED`.
        path: Package to write.
        scratch: Folder for temporary files.
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
    """Return the input in the only layout that packages read."""
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format
    )


def _forms(inputs: Sequence[Tensor]) -> list[list[object]]:
    """Describe the inputs as far as a package depends on them: all but the batch size."""
    return [[str(x.dtype), *x.shape[1:]] for x in inputs]
