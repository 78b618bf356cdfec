"""Compares the kernel of `one_launch` with the exact way, by Triton's interpreter on a CPU.

`python -m tests.models.vision.one_launch_check --num 500` checks 500 pictures of random sizes,
in batches of any interpolation, size, dtype and layout.
"""

import argparse
import os
import sys
from random import Random

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_INTERPOLATIONS = [Image.Resampling[name] for name in ("NEAREST", "BILINEAR", "BICUBIC", "LANCZOS")]
_EDGES = [(36, 32), (32, 32), (29, 28), (24, 36)]
"""To resize to and to crop; the last ones leave a black edge."""
_BATCH = 5
_MAX_SHARE = 0.005
"""Most values that may be off by a level."""


def main(num: int, seed: int) -> int:
    """Check pictures, print how far each interpolation is off, and return the exit code."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    random = Random(seed)
    is_right = True
    for interpolation in _INTERPOLATIONS:
        off = torch.cat([_off(interpolation, random) for _ in range(num // 4 // _BATCH)])
        share = (off > 0).float().mean().item()
        is_right &= off.max().item() <= 1 and share <= _MAX_SHARE
        print(  # noqa: T201 - for people
            f"{interpolation.name:9} {num // 4} pictures, at most {off.max().item()} levels off, "
            f"on {share:.4%} of the values"
        )
    return 0 if is_right else 1


def _off(interpolation: Image.Resampling, random: Random) -> Tensor:
    """Return by how many levels each value of a random batch is off."""
    from inferpool.models.vision import one_launch
    from inferpool.models.vision.transforms import ImageTransform, Normalize

    one_launch._ROWS = one_launch._COLUMNS = 64  # one block: the interpreter runs them in turn
    resize, crop = random.choice(_EDGES)
    transform = ImageTransform(resize=resize, crop=crop, interpolation=interpolation)
    pictures = [_picture(random) for _ in range(_BATCH)]
    layout = random.choice([torch.channels_last, torch.contiguous_format])
    # The interpreter cuts bf16 off, where a GPU rounds it.
    dtype = random.choice([torch.float32, torch.float16])
    found = torch.empty(_BATCH, 3, crop, crop, dtype=dtype, memory_format=layout)
    one_launch.transform(
        [_laid_out(each, random) for each in pictures],
        transform.windows([each.shape[:2] for each in pictures]),
        interpolation,
        torch.tensor([transform.mean, transform.std]),
        found,
    )
    exact = torch.stack([transform.pixels(Image.fromarray(each)) for each in pictures])
    levels_LC = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 3)
    known_CL = Normalize(transform)(levels_LC[None, :, None])[0, :, :, 0].to(dtype)
    off = []
    for channel, known_L in enumerate(known_CL):
        values = found[:, channel].reshape(-1)
        nearest = (values[:, None].float() - known_L.float()).abs().argmin(1)
        assert torch.equal(known_L[nearest], values), "not the values of `Normalize`"
        off.append((nearest - exact[..., channel].reshape(-1).int()).abs())
    return torch.cat(off)


def _picture(random: Random) -> np.ndarray:
    """Return a picture [H, W, C] of a random size, smooth with noise."""
    short = random.randint(1, 90)
    height, width = random.sample([short, int(short * random.uniform(1, 3))], 2)
    numbers = np.random.default_rng(random.randrange(1 << 30))
    coarse = numbers.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = numbers.integers(-30, 31, (height, width, 3))
    return (np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)


def _laid_out(picture: np.ndarray, random: Random) -> Tensor:
    """Return it as [C, H, W] with colours side by side or apart."""
    x_CHW = torch.from_numpy(picture).permute(2, 0, 1)
    return x_CHW if random.random() < 0.5 else x_CHW.contiguous()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
