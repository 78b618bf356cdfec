"""Seeds the libraries that draw random numbers. Worker processes only.

Without it all workers would draw the same ones: a fork copies what torch and NumPy have, and each
interpreter begins torch's generator with the same number.
"""

import random
import secrets
import sys

import torch

_SEED_BITS = 63
_WORD = 2**32
"""NumPy's seeds are words of 32 bits."""


def seed_anew(number: int | None = None) -> None:
    """Have this process draw other random numbers than any other one, on all devices.

    A device that is not initialised yet is seeded later. A library that is not imported yet seeds
    itself.

    Args:
        number: The seed, for processes that must draw the same numbers; by default one of the
            kernel's.
    """
    number = new_number() if number is None else number
    torch.manual_seed(number)
    random.seed(number)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed([number % _WORD, number // _WORD])


def new_number() -> int:
    """Return a seed that is new."""
    return secrets.randbits(_SEED_BITS)
