"""Models of the benchmarks: a network of any size, and devices that a wait plays."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import inferpool
from inferpool.models.base import Model
from inferpool.models.files.checkpoint import StoredWeights
from inferpool.models.item import Features, Item
from inferpool.models.sources.modules import ModuleModel
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform
from tests.fault_model import FaultModel

STACK = "tests.bench.models:StackModel"
SLEEPER = "tests.bench.models:Sleeper"
STAND_IN = "tests.bench.models:StandIn"
TOKENS = "tests.bench.models:TokenStreams"
FIRST_BYTES = "tests.bench.models:FirstBytes"
WIDTH = 2048
HIDDEN = 4 * WIDTH
BLOCK_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH)


class StandIn(Classifier):
    """Answers any picture with the same labels; its device is a wait, which takes no core."""

    prepares_apart = True

    def __init__(self, *, image_s: float = 0.0001) -> None:
        """Store the seconds that the device takes for each picture."""
        labels = [f"label {i}" for i in range(10)]
        super().__init__(transform=ImageTransform(resize=256, crop=224), labels=labels)
        self._image_s = image_s

    def load(self, placement: Placement) -> None:
        """Load nothing."""

    def forward(self, batch: Features) -> Features:
        num = len(batch["image"])
        time.sleep(num * self._image_s)
        return {"logits": torch.zeros(num, 10)}


class Sleeper(FaultModel):
    """Takes the inputs of `FaultModel`, and a time that grows with the batch, but no core."""

    def __init__(self, *, batch_s: float = 0.0, item_s: float = 0.0) -> None:
        """Store the seconds of each batch, and of each of its instances."""
        super().__init__()
        self._batch_s, self._item_s = batch_s, item_s

    def forward(self, batch: Features) -> Features:
        time.sleep(self._batch_s + len(batch["x"]) * self._item_s)
        return super().forward(batch)


class StackBlock(nn.Module):
    """x + down(gelu(up(norm(x)))), as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


class BlockStack(nn.Module):
    """Blocks, one after the other: float32 [B, W] in and out."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(StackBlock() for _ in range(num_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class StackModel(ModuleModel):
    """Serves a stack, in processes whose memory may be limited.

    Args:
        num_blocks: Blocks of the stack.
        weights: Index that `write_stack` returns; None for random weights.
        groups: Folder of control groups called 0, 1, ..., one for each rank, that limit its memory;
            "" for no limit.
    """

    def __init__(self, *, num_blocks: int, weights: str | None = None, groups: str = "") -> None:
        spec = partial(TensorSpec, dtype="float32", shape=(-1, WIDTH))
        super().__init__(
            partial(BlockStack, num_blocks),
            weights=weights,
            inputs=[spec(name="x")],
            outputs=[spec(name="y")],
        )
        self._groups = groups

    def load(self, placement: Placement) -> None:
        """Enter the control group of this rank, and load."""
        if self._groups:
            rank = self.ranks.rank if self.ranks else 0
            Path(self._groups, str(rank), "cgroup.procs").write_text(str(os.getpid()))
        super().load(placement)


def write_stack(folder: Path, num_blocks: int) -> Path:
    """Make a checkpoint of random weights, block by block, a file for each; return its index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        names: dict[str, str] = {}
        for number in range(num_blocks):
            torch.manual_seed(number)
            state = StackBlock().state_dict()
            tensors = {f"blocks.{number}.{name}": value for name, value in state.items()}
            file = f"model-{number:05}.safetensors"
            save_file(tensors, folder / file)
            names |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps({"weight_map": names}))
    return index


def compute_by_blocks(index: Path, num_blocks: int, x: Tensor) -> Tensor:
    """Compute the stack with one block of it in memory at a time."""
    block = StackBlock().eval()
    stored = StoredWeights(index, block)
    with torch.inference_mode():
        for number in range(num_blocks):
            state = {name: stored.read(f"blocks.{number}.{name}") for name in block.state_dict()}
            block.load_state_dict(state)
            x = block(x)
    return x


class FirstBytes(Model):
    """Answers bytes of any number with the first four, so that only their way costs anything."""

    inputs = (TensorSpec(name="bytes", dtype="uint8", shape=(-1, -1)),)
    outputs = (TensorSpec(name="first", dtype="float32", shape=(-1, 4)),)

    def forward(self, batch: Features) -> Features:
        return {"first": batch["bytes"][:, :4].float()}


class TokenStreams(Model):
    """Streams that new ones join: {"parts": 100, "bytes": 5} has 100 texts of 5 bytes.

    Its device is a wait in each step, which takes no core.
    """

    joins = True
    example: object = {"parts": 2, "bytes": 5}  # of models too

    def __init__(self, *, step_s: float = 0.01) -> None:
        """Store the seconds of a step."""
        self._step_s = step_s
        self._left: dict[int, int] = {}
        self._texts: dict[int, str] = {}

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        return {"plan": torch.tensor([value["parts"], value["bytes"]])}  # type: ignore[call-overload, index]  # the benchmark sends nothing else

    def stream(self, batch: Features) -> Iterator[object]:
        """Give each stream its next text in each step."""
        self._left.clear()
        self.admit(batch, range(len(batch["plan"])))
        while self._left:
            time.sleep(self._step_s)
            step: dict[int, object] = {each: self._texts[each] for each in self._left}
            for position, left in [*self._left.items()]:
                if left:
                    self._left[position] = left - 1
                else:
                    step[position] = inferpool.END
                    self.drop(position)
            yield step

    def admit(self, batch: Features, positions: Sequence[int]) -> None:
        """Begin some more."""
        for position, (parts, num_bytes) in zip(positions, batch["plan"].tolist(), strict=True):
            self._left[position], self._texts[position] = parts, "x" * num_bytes

    def drop(self, position: int) -> None:
        """End one."""
        del self._left[position], self._texts[position]
