"""Descriptors that this process has open, for tests that look for leaks."""

import gc
import os


def names_open() -> list[str]:
    """Return their numbers, without those that garbage of earlier tests holds."""
    gc.collect()
    return os.listdir("/proc/self/fd")


def num_open() -> int:
    """Return how many there are."""
    return len(names_open())
