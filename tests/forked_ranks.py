"""Ranks of training runs that are forked from a process that has imported torch.

A rank of its own takes seconds to import it. Only tests of processes need one.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from inferpool.workers.training.rank import main


def launch_forked(config: LaunchConfig, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in ranks; what they wrote to stderr goes to that of this process."""
    set_forkserver_preload(["torch", "torchvision", main.__module__])
    with tempfile.TemporaryDirectory() as logs:
        forked = replace(
            config,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ERR),
        )
        try:
            launch_agent(forked, function, list(arguments))
        finally:
            for log in sorted(Path(logs).rglob("stderr.log")):
                sys.stderr.write(log.read_text())


def train_forked(config: LaunchConfig, _: str, words: list[Any]) -> None:
    """Stand for `launch_agent`, which starts `python -m inferpool.workers.training.rank FOLDER`."""
    assert words[:-1] == ["-m", main.__module__]
    launch_forked(config, _train, words[-1])


def _train(folder: str) -> None:
    if status := main([folder]):
        sys.exit(status)
