"""A small network to train in tests, which can be told to fail, and digits to train it on."""

import os
import signal
import time
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

TINY = "tests.training_network:TinyNet"


class TinyNet(nn.Module):
    """Tells digits apart after a few epochs.

    Args:
        num_classes: Number of classes.
        nan_at: Number of the training pass, from 1, whose logits are NaN; 0 for none.
        raise_at: Number of the training pass that raises; 0 for none.
        stop_at: Number of the training pass that stops the command, if `stop_file` is there.
        stop_file: A file with the number of the command's process, which is removed then.
        wait_at: Number of the training pass that waits while `wait_file` holds the number of the
            present restart of the ranks; 0 for none.
        wait_file: A file with the number of a restart, from 0.
        dropout: Share of features that are dropped at random.
    """

    def __init__(
        self,
        num_classes: int,
        nan_at: int = 0,
        raise_at: int = 0,
        dropout: float = 0.1,
        stop_at: int = 0,
        stop_file: str = "",
        wait_at: int = 0,
        wait_file: str = "",
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        )
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(64 * 16, num_classes)
        self.nan_at, self.raise_at, self.stop_at = nan_at, raise_at, stop_at
        self.stop_file = Path(stop_file)
        self.wait_at, self.wait_file = wait_at, Path(wait_file)
        self.num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Turn float32 [B, 3, 32, 32] into logits [B, K]."""
        logits: Tensor = self.last(self.dropout(self.body(x).flatten(1)))
        if self.training and len(x) > 2:  # two images are a look at the memory
            self.num_passes += 1
            if self.num_passes == self.nan_at:
                return logits * torch.nan
            if self.num_passes == self.raise_at:
                raise ValueError("this network is broken\nbeyond repair")
            if self.num_passes == self.stop_at and self.stop_file.exists():
                command = int(self.stop_file.read_text())
                self.stop_file.unlink()
                _stop(command)
            if self.num_passes == self.wait_at:
                while self.wait_file.read_text() == os.environ["TORCHELASTIC_RESTART_COUNT"]:
                    time.sleep(0.01)
        return logits


def _stop(command: int) -> None:
    """Send the command that started this rank SIGTERM, and wait until it has passed it on."""
    before = signal.getsignal(signal.SIGTERM)
    assert callable(before), "the rank handles it"
    told: list[int] = []  # an event's lock may be held by what the signal interrupts
    signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))
    os.kill(command, signal.SIGTERM)
    until = time.monotonic() + 60
    while not told:
        assert time.monotonic() < until
        time.sleep(0.01)
    before(signal.SIGTERM, None)


def write_digits(folder: Path, num: int = 600) -> Path:
    """Write handwritten digits of 8 x 8 pixels as PNG, in a subfolder for each label."""
    from sklearn.datasets import load_digits  # takes two seconds, which each rank would pay for

    digits = load_digits()
    for number, (image, target) in enumerate(zip(digits.images[:num], digits.target, strict=False)):
        path = folder / str(target) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * (255 / 16)).round().astype("uint8")).save(path)
    return folder
