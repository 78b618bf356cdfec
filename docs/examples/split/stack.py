"""A network that one device may not hold: a stack of MLP blocks, split over two processes."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inferpool import Features, Model, Placement, TensorSpec

WIDTH, DEPTH = 512, 8
WEIGHTS = Path(__file__).with_name("stack.safetensors")


class Stack(Model):
    """Serves the stack. `load_network` gives each process the part that it computes."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, WIDTH)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, WIDTH)),)

    def load(self, placement: Placement) -> None:
        """Load the weights: all of them, or those of this process's part."""
        self.device = torch.device(placement.devices[0])
        self.stack = self.load_network(build, WEIGHTS, placement, example=[torch.zeros(1, WIDTH)])

    def forward(self, batch: Features) -> Features:
        """Compute float32 [B, 512]; on a split replica the call goes through all parts."""
        y = self.stack(batch["x"].to(self.device))
        assert isinstance(y, Tensor)
        return {"y": y}


def build() -> nn.Module:
    """Build the network without its weights."""
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


class Block(nn.Module):
    """One MLP block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [B, 512] from float32 [B, 512]."""
        y: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + y


if __name__ == "__main__":
    torch.manual_seed(1)
    save_file(build().state_dict(), WEIGHTS)
