"""Imported by the forkserver where a model comes from torchvision, which takes 4 s to import."""

import contextlib

# One that does not fit the installed torch is the worker's to report, with its model.
with contextlib.suppress(Exception):
    import torchvision  # type: ignore[import-untyped]
