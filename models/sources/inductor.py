"""Serves packages of AOTInductor: networks compiled ahead for one kind of device. In workers only.

Such a package is machine code: serve only those of makers that you trust. What it checks of its
inputs, it says in the source of its wrapper, which lies in it; so do the shapes and dtypes here.
"""

import contextlib
import logging
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.inputs import describe
from inferpool.models.sources.modules import SizedModel
from inferpool.models.spec import DTYPE_BYTES, Placement, TensorSpec

logger = logging.getLogger(__name__)

_CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""With this variable a package refuses inputs of other shapes, which it would misread."""
_MOST_SOURCE_BYTES = 64 << 20
_CHECK = re.compile(r"static void check_input_(\d+)\((.*?)\n\}", re.DOTALL)
_DTYPE = re.compile(r"_expected_dtype = aoti_torch_dtype_(\w+)\(\)")
_SIZE = re.compile(r"if \((\d+) != \w+_size\[(\d+)\]\)")
_LEAST = re.compile(r"if \(\w+_size\[(\d+)\] < (\d+)\)")
_MOST = re.compile(r"if \(\w+_size\[(\d+)\] > (\d+)\)")
_RANK = re.compile(r"\w+_size\[(\d+)\]")


class _Checked(NamedTuple):
    """An input as the wrapper checks it."""

    dtype: str
    sizes: Sequence[int]
    """Sizes, with -1 for those that may vary."""
    least: int
    most: int
    """Range of the batch."""


class InductorModel(SizedModel):
    """Serves a `.pt2` file of `torch._inductor.aoti_compile_and_package`.

    Dimension 0 of all inputs and outputs is the batch. If the package accepts only one batch size
    or a limited range, larger batches are computed in pieces, the last one filled up.

    Args:
        path: The package.
        inputs: Inputs, in order; by default as the package says.
        outputs: Outputs, in order; by default found by a trial.
        finite_outputs: Whether NaN and infinities in the outputs are errors.
        repeatable: See `Model`.
        alone_as_in_batch: See `Model`.
    """

    can_run_ahead = True

    def __init__(
        self,
        path: Path,
        *,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
        finite_outputs: bool = True,
        repeatable: bool = True,
        alone_as_in_batch: bool = True,
    ) -> None:
        super().__init__(
            inputs=inputs,
            outputs=outputs,
            finite_outputs=finite_outputs,
            repeatable=repeatable,
            alone_as_in_batch=alone_as_in_batch,
        )
        self._path = path
        self._declared = list(inputs)

    def load(self, placement: Placement) -> None:
        """Load the package, try it if the shapes of its inputs are known, and log what it takes.

        Raises:
            ModelError: It cannot be loaded here, or fails.
        """
        super().load(placement)
        size = self.fixed_size
        logger.info(
            "%s: a package of AOTInductor for %s; inputs %s; outputs %s; %s",
            self._path,
            self.device.type,
            describe(self.inputs),
            describe(self.outputs) if self.outputs else "not known before a call",
            f"computes {size} at a time"
            if size
            else f"batches of {self.smallest} to {self.largest}"
            if self.largest < sys.maxsize
            else "batches of any size",
        )

    def build_network(self, placement: Placement) -> Callable[..., object]:
        """Load the package, and find out what it takes.

        Raises:
            SourceError: It is damaged, or is for another platform.
            ModelError: It is for another kind of device.
        """
        os.environ[_CHECKS] = "1"
        made_for = _device_of(self._path) or self.device.type
        if made_for != self.device.type:
            raise ModelError(
                f"{self._path} is compiled for {made_for}, but is to run on {placement}: set "
                f'devices = "{made_for}", or compile it again for {self.device.type}'
            )
        package = self._package()
        in_spec = pytree.treespec_loads(package.loader.get_call_spec()[0])
        names = _names_of(in_spec)
        checked = _read_checks(self._path)
        if len(checked) == len(names):
            self.smallest = max(each.least for each in checked)
            self.largest = min(each.most for each in checked)
            if self.smallest > self.largest:
                raise ModelError(f"the inputs of {self._path} have different batch sizes")
        else:
            checked = [_Checked("float32", (), 1, sys.maxsize)] * len(names)
        if len(self._declared or names) != len(names):
            raise SourceError(
                f"{self._path} takes {len(names)} inputs, but options.inputs has "
                f"{len(self._declared)}"
            )
        self.inputs = self._declared or [
            TensorSpec(
                name=name, dtype=each.dtype, shape=(-1, *each.sizes[1:]) if each.sizes else ()
            )
            for name, each in zip(names, checked, strict=True)
        ]

        def call(*flat: Tensor) -> object:
            arguments, keywords = pytree.tree_unflatten(flat, in_spec)
            return package(*arguments, **keywords)

        return call

    def _package(self) -> Any:
        # It warns where there is no toolkit of CUDA, which a package does not need.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        try:
            return torch._inductor.aoti_load_package(str(self._path))
        except Exception as error:  # a damaged package makes it raise almost anything
            if lacks_resources(error):
                raise
            raise SourceError(f"{self._path} cannot be loaded: {first_line(error)}") from error


def _device_of(path: Path) -> str:
    """Return the kind of device that a package is for, from its metadata; empty if it says none."""
    for _, text in _texts_in(path, "metadata.json"):
        with contextlib.suppress(msgspec.DecodeError):
            if device := msgspec.json.decode(text, type=dict[str, object]).get("AOTI_DEVICE_KEY"):
                return str(device)
    return ""


def _texts_in(path: Path, suffix: str) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of files in a package, but for very large ones.

    Raises:
        SourceError: The package is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for each in archive.infolist():
                if each.filename.endswith(suffix) and each.file_size <= _MOST_SOURCE_BYTES:
                    yield each.filename, archive.read(each).decode("utf-8", "replace")
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{path} is damaged: {error}") from error


def _names_of(in_spec: Any) -> list[str]:
    """Return the names of the inputs: keywords have their own, others "input" and a number."""
    flat = [str(number) for number in range(in_spec.num_leaves)]
    _, keywords = pytree.tree_unflatten(flat, in_spec)
    names = {each: name for name, each in keywords.items() if isinstance(each, str)}
    others = [each for each in flat if each not in names]
    for place, each in enumerate(others):
        names[each] = "input" if len(others) == 1 else f"input_{place}"
    return [names[each] for each in flat]


def _read_checks(path: Path) -> list[_Checked]:
    """Return what the wrapper in the package checks of each input; nothing if it does not say."""
    texts = [text for _, text in _texts_in(path, ".cpp")]
    found: dict[int, _Checked] = {}
    for match in (match for text in texts for match in _CHECK.finditer(text)):
        body = match[2]
        dtype = _DTYPE.search(body)
        num_dims = 1 + max((int(place) for place in _RANK.findall(body)), default=-1)
        if dtype is None or dtype[1] not in DTYPE_BYTES or not num_dims:
            return []
        sizes = [-1] * num_dims
        for size, place in _SIZE.findall(body):
            sizes[int(place)] = int(size)
        least = {int(place): int(size) for place, size in _LEAST.findall(body)}
        most = {int(place): int(size) for place, size in _MOST.findall(body)}
        fixed = None if sizes[0] == -1 else sizes[0]
        found[int(match[1])] = _Checked(
            dtype[1], sizes, fixed or max(1, least.get(0, 1)), fixed or most.get(0, sys.maxsize)
        )
    return [found[number] for number in sorted(found)]
