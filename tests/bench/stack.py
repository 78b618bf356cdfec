"""A network as large as one likes: a stack of MLP blocks, as transformers have, between residuals.

Its weights are made block by block, and it can be computed block by block, so that neither takes
the memory of the whole. Imports torch: worker processes, and the benchmark `split` when it does so.
"""

import json
import os
import resource
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.spec import Placement, TensorSpec

WIDTH = 2048
HIDDEN = 4 * WIDTH
BLOCK_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH)
_FILE_BYTES = 512 << 20
_SEED = 0


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    """Blocks, one after the other: float32 [B, W] to the same."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class StackModel(ModuleModel):
    """Serves a stack, in processes that may be allowed only so much memory.

    Args:
        num_blocks: Of the stack.
        weights: As `write_stack` makes them; None for random ones.
        limit_bytes: Of memory, for each process, counted from the beginning of its load; 0: none.
        groups: The folder of control groups called 0, 1, ..., one for each rank, that have the
            limit; "" has RLIMIT_DATA set instead.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        weights: str | None = None,
        limit_bytes: int = 0,
        groups: str = "",
    ) -> None:
        spec = partial(TensorSpec, dtype="float32", shape=(-1, WIDTH))
        super().__init__(
            partial(Stack, num_blocks),
            weights=weights,
            inputs=[spec(name="x")],
            outputs=[spec(name="y")],
        )
        self._limit_bytes = limit_bytes
        self._groups = groups

    def load(self, placement: Placement) -> None:
        """Accept the limit, and load."""
        rank = self.ranks.rank if self.ranks else 0
        if self._groups:
            Path(self._groups, str(rank), "cgroup.procs").write_text(str(os.getpid()))
        elif self._limit_bytes:
            limit = _data_bytes() + self._limit_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        super().load(placement)


def write_stack(folder: Path, num_blocks: int) -> Path:
    """Make a checkpoint of random weights in several files, unless it is there.

    Returns:
        Its index.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return index
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    per_file = max(1, _FILE_BYTES // BLOCK_BYTES)
    for number, begin in enumerate(range(0, num_blocks, per_file)):
        file = f"model-{number:05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for block in range(begin, min(begin + per_file, num_blocks)):
            tensors |= _made_block(block)
        save_file(tensors, folder / file)
        names |= dict.fromkeys(tensors, file)
    index.write_text(json.dumps({"weight_map": names}))
    return index


def compute_by_blocks(index: Path, num_blocks: int, x: Tensor) -> Tensor:
    """What the stack gives, with one block of it in memory at a time."""
    stored = StoredWeights(index)
    block = Block().eval()
    with torch.inference_mode():
        for number in range(num_blocks):
            state = {name: stored.read(f"blocks.{number}.{name}") for name in block.state_dict()}
            block.load_state_dict(state)
            x = block(x)
    return x


def _made_block(number: int) -> Mapping[str, Tensor]:
    torch.manual_seed(_SEED + number)
    return {f"blocks.{number}.{name}": value for name, value in Block().state_dict().items()}


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process now (VmData, proc(5))."""
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text().splitlines())
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
