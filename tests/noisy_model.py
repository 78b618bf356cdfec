"""A model that says much, in every way there is but logging."""

import ctypes
import os
import sys
import warnings

from inferpool.models.item import Features, Item
from tests.fault_model import FaultModel

SAID = {
    "stdout": ["from Python", "from C"],
    "stderr": ["from Python to stderr", "with two", "lines in one write", "\\xff is no text"],
}


class NoisyModel(FaultModel):
    """As `FaultModel`, whose acts it does after it has said what it has to say."""

    def preprocess(self, item: Item) -> Features:
        print("from Python")  # noqa: T201  # that is the point
        print("from Python to stderr", file=sys.stderr)  # noqa: T201
        os.write(2, b"with two\nlines in one write\n\xff is no text\n")
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        warnings.warn("from the warnings module", stacklevel=1)
        return super().preprocess(item)
