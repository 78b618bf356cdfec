"""Bytecode of what the tests' processes import is kept, also where the environment says not to.

The tests start some hundred interpreters, each of which would compile torch anew, for two seconds.
"""

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if sys.dont_write_bytecode and config.cache is not None:
        sys.pycache_prefix = str(
            config.cache.mkdir("bytecode")
        )  # the environment's own stays clean
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
