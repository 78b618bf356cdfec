"""Trains the classifier on shapes that it draws, and writes its weights. Takes some seconds."""

import random

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from shapes import LABELS, WEIGHTS, draw, network
from torch import Tensor
from torch.nn import functional

STEPS, BATCH = 80, 48
MEAN = torch.tensor([0.485, 0.456, 0.406])
STD = torch.tensor([0.229, 0.224, 0.225])


def normalized(images: list[Image.Image]) -> Tensor:
    """Turn pictures into float32 [B, 3, 32, 32], as the service will."""
    pixels = torch.from_numpy(np.stack([np.array(image) for image in images])) / 255
    return ((pixels - MEAN) / STD).permute(0, 3, 1, 2)


def main() -> None:
    """Train, save the weights, and save one picture to ask about."""
    chance = random.Random(1)
    torch.manual_seed(1)
    net = network().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    right = 0
    for step in range(STEPS):
        labels = [chance.randrange(len(LABELS)) for _ in range(BATCH)]
        targets = torch.tensor(labels)
        logits = net(normalized([draw(LABELS[label], chance) for label in labels]))
        functional.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS - 10:
            right += int((logits.argmax(1) == targets).sum())
    print(f"right in the last ten batches: {right / (10 * BATCH):.0%}")
    save_file(net.state_dict(), WEIGHTS)
    draw("triangle", random.Random(7)).save("triangle.png")


if __name__ == "__main__":
    main()
