"""Networks compiled to machine code once, then loaded in a moment. Worker processes only.

Compiling (`compile_network`) takes a minute and imports much, so it has a process of its own.
Loading (`Compiled`) needs neither the compiler nor torch's Python code for it.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.device import is_accelerator
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.speed.presets import Recast, prepare

MADE_OF = {"compiled": "folded", "compiled_bf16": "bf16", "compiled_fp16": "fp16"}
"""The preset that gives each compiled preset its network."""
_FORMS = "inputs"
_MOST_HINTED = 64
"""Largest batch that a compiler for an accelerator chooses its kernels for; others use them."""
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a network's inputs that float32 is converted to."""

Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""Computes the outputs of a package; it may change the list."""


class PackageCompiler(Protocol):
    """Compiles networks for one kind of device. `Inductor` does, for CPUs and CUDA."""

    def compile(
        self, network: nn.Module, inputs: Sequence[Tensor], path: Path, scratch: Path, forms: str
    ) -> None:
        """Write a package for batches of any size, with a text about its inputs.

        Args:
            network: On the device, in eval mode, without gradients.
            inputs: A batch of the size to choose kernels for, on the device.
            path: Package to write.
            scratch: Folder for temporary files.
            forms: The text.
        """

    def load(self, path: Path, device: torch.device) -> tuple[Call, Callable[..., object], str]:
        """Return what computes, what makes one object of its outputs, and the text."""


def compiler_for(device: torch.device) -> PackageCompiler | None:
    """Return the compiler for a kind of device; None if it has none."""
    if not is_accelerator(device):
        return Inductor()
    kind = accelerator_of(device.type)
    if kind is None or not kind.compiler:
        return None
    module, _, name = kind.compiler.partition(":")
    found: PackageCompiler = getattr(import_module(module), name)()
    return found


class Compiled(nn.Module):
    """A network in a package that `compile_network` wrote."""

    memory_format = torch.channels_last
    """Best layout of inputs; `input_dtype` is their best dtype, which float32 is converted to."""

    def __init__(
        self, path: Path, exact: nn.Module | None = None, device: torch.device | None = None
    ) -> None:
        """Load the package.

        Args:
            path: Path of the package.
            exact: Network for inputs of shapes other than the compiled ones; None if there are
                none.
            device: The device that computes; by default the CPU.

        Raises:
            PermissionError: Other users could have written the package, which is code.
        """
        super().__init__()
        for each in (path, path.parent):
            status = each.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise PermissionError(f"{each} could have been written by others")
        device = device or torch.device("cpu")
        compiler = compiler_for(device)
        assert compiler is not None, "a package was found for this device"
        self._run, self._join, text = compiler.load(path, device)
        self._forms = json.loads(text)
        dtypes = (getattr(torch, form[0].removeprefix("torch.")) for form in self._forms)
        self.input_dtype: torch.dtype | None = next((x for x in dtypes if x in _CONVERTED), None)
        self._exact = exact

    def forward(self, *inputs: Tensor) -> object:
        """Compute a batch of any size."""
        # The package itself looks at neither shapes nor strides: it would read past the end.
        fitted = [self._fitted(x) for x in inputs]
        if _forms(fitted) != self._forms:
            if self._exact is None:
                raise ValueError(f"compiled for {self._forms}, called with {_forms(inputs)}")
            return self._exact(*inputs)
        return self._join(self._run(fitted))

    def _fitted(self, x: Tensor) -> Tensor:
        wanted = self.input_dtype if x.dtype == torch.float32 else None
        return _laid_out(x, wanted or x.dtype)


class Inductor:
    """Compiles by torch's compiler, ahead of time. On CUDA it needs CUDA's headers and Triton."""

    def compile(
        self, network: nn.Module, inputs: Sequence[Tensor], path: Path, scratch: Path, forms: str
    ) -> None:
        """Write a package; see `PackageCompiler`."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
        if is_accelerator(inputs[0].device):
            _show_cuda(scratch)
        import torch._inductor.config as inductor

        # No pool of compiling processes, which would outlive a killed one of ours.
        inductor.compile_threads = 1
        batch = torch.export.Dim("batch", min=1)
        with torch.no_grad():
            program = torch.export.export(
                network, tuple(inputs), dynamic_shapes=(tuple({0: batch} for _ in inputs),)
            )
            # Freezing folds what depends on weights alone, and lays these out for the kernels.
            configs = {"freezing": True, "aot_inductor.metadata": {_FORMS: forms}}
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=configs
            )

    def load(self, path: Path, device: torch.device) -> tuple[Call, Callable[..., object], str]:
        """Load a package; see `PackageCompiler`."""
        is_apart = is_accelerator(device)
        # torch._inductor.aoti_load_package does the same, but imports the compiler for it. Events
        # that order threads would spoil the capture of a graph, so on devices one thread calls.
        loader = torch._C._aoti.AOTIModelPackageLoader(
            str(path), "model", is_apart, 1, (device.index or 0) if is_apart else -1
        )
        _, out_spec = map(pytree.treespec_loads, loader.get_call_spec())
        join = partial(pytree.tree_unflatten, treespec=out_spec)
        return loader.boxed_run, join, loader.get_metadata()[_FORMS]


def _show_cuda(scratch: Path) -> None:
    """Show torch's compiler where CUDA's headers and the driver's library are."""
    wheels = Path(torch.__file__).parent.with_name("nvidia") / f"cu{(torch.version.cuda or '')[:2]}"
    has_toolkit = shutil.which("nvcc") or Path("/usr/local/cuda").exists()
    if not has_toolkit and wheels.exists():
        os.environ.setdefault("CUDA_HOME", str(wheels))
    for each in Path("/proc/self/maps").read_text().split():  # this process uses the driver
        if Path(each).name.startswith("libcuda.so"):
            # The linker wants a name that only toolkits have.
            Path(scratch, "libcuda.so").symlink_to(each)
            before = os.environ.get("LIBRARY_PATH")
            os.environ["LIBRARY_PATH"] = f"{scratch}:{before}" if before else str(scratch)
            return


def can_compile() -> bool:
    """Return whether there is a C++ compiler, found as torch finds it."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_network(
    network: nn.Module,
    run: Callable[[nn.Module], object],
    preset: str,
    path: Path,
    scratch: Path,
    *,
    max_batch_size: int = 1,
) -> None:
    """Compile a network for the device that it is on, and for batches of any size.

    Args:
        network: In eval mode, without gradients.
        run: Calls the given network with a batch of two or more samples.
        preset: One of `speed_names.COMPILED`.
        path: Package to write.
        scratch: Folder for temporary files.
        max_batch_size: Most instances in a forward pass on an accelerator.
    """
    changed = prepare(MADE_OF[preset], network, run)
    inputs = _inputs(network, run)
    device = inputs[0].device
    compiler = compiler_for(device)
    assert compiler is not None, "the caller has asked"
    if is_accelerator(device):
        size = max(len(inputs[0]), min(max_batch_size, _MOST_HINTED))
        numbers = torch.arange(size, device=device) % len(inputs[0])
        inputs = tuple(_laid_out(x[numbers], _own_dtype(x, changed)) for x in inputs)
    draft = scratch / "package.pt2"
    compiler.compile(changed, inputs, draft, scratch, json.dumps(_forms(inputs)))
    draft.chmod(0o600)
    draft.replace(path)


def _own_dtype(x: Tensor, network: Recast) -> torch.dtype:
    return network.input_dtype if x.dtype == torch.float32 else x.dtype


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
    return tuple(_laid_out(x.clone(), x.dtype) for x in seen[0])


def _laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input in a dtype, and in the only layout that packages read."""
    return x.to(dtype).contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format
    )


def _forms(inputs: Sequence[Tensor]) -> list[list[object]]:
    """Describe the inputs as far as a package depends on them: all but the batch size."""
    return [[str(x.dtype), *x.shape[1:]] for x in inputs]
