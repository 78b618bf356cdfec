"""Ranks of training runs that are forked from a process that has imported torch.

A rank of its own takes seconds to import it. Only tests of processes need one.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from inferpool.service.cli.main import run
from inferpool.workers.training import launch
from inferpool.workers.training.rank import main

_IMPORTED = ("torch", "torchvision", main.__module__, "inferpool.service.train.run", __name__)
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch's launcher handles."""


def launch_forked(
    config: LaunchConfig,
    function: Callable[..., None],
    *arguments: object,
    start_method: str = "forkserver",
) -> None:
    """Call a function in ranks; what they wrote to stderr goes to that of this process."""
    set_forkserver_preload([*_IMPORTED])
    # The rendezvous names its caller in its own log, and searches all modules for it: seconds.
    anonymous = mock.patch.object(dynamic_rendezvous, "get_method_name", str)
    handlers = {each: signal.getsignal(each) for each in _HANDLED}
    with tempfile.TemporaryDirectory() as logs, anonymous:
        forked = replace(
            config,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ERR),
        )
        try:
            launch_agent(forked, function, list(arguments))
        finally:
            for number, handler in handlers.items():  # torch leaves its own
                signal.signal(number, handler)
            for log in sorted(Path(logs).rglob("stderr.log")):
                sys.stderr.write(log.read_text())


def train_forked(
    config: LaunchConfig, _: str, words: list[Any], *, start_method: str = "forkserver"
) -> None:
    """Stand for `launch_agent`, which starts `python -m inferpool.workers.training.rank FOLDER`."""
    assert words[:-1] == ["-m", main.__module__]
    launch_forked(config, _train, words[-1], start_method=start_method)


def start_command(words: Sequence[str], stderr: Path) -> BaseProcess:
    """Start `inferpool` with these words in a forked process, which forks the ranks in turn."""
    set_forkserver_preload([*_IMPORTED])
    process = get_context("forkserver").Process(target=_run, args=(words, stderr))
    process.start()
    return process


def _run(words: Sequence[str], stderr: Path) -> None:
    with stderr.open("w") as file:
        os.dup2(file.fileno(), 2)
    # It has no threads but those of the agent, which a rank does without.
    with mock.patch.object(launch, "launch_agent", partial(train_forked, start_method="fork")):
        sys.exit(run(words))


def _train(folder: str) -> None:
    if status := main([folder]):
        sys.exit(status)
