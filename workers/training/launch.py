"""Starts the ranks of this host under torchrun's elastic agent, and starts them again."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from inferpool.models.files.run_folder import RunFolder
from inferpool.workers.shared.threads import spin_briefly
from inferpool.workers.training.stopping import GRACE_S

_MODULE = "inferpool.workers.training.rank"
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")
"""Loggers of torchrun, which stay silent: the progress says when ranks start again."""
_DEATHS = "torch.distributed.elastic.multiprocessing.api"
"""The logger that reports ranks that have died, with their exit status first."""
_LONGER_S = 10


class RanksLostError(Exception):
    """Ranks died more often than they may be started again, or never met. One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """The places of ranks, and how often they are started again."""

    num_ranks: int
    """Ranks of this host."""
    min_nodes: int = 1
    max_nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT at which hosts meet; that host opens the port. Empty for this host alone."""
    run_id: str
    """A name that the hosts of one run have in common."""
    max_restarts: int
    """How often all ranks may be started again, after one of them died."""


def run_ranks(folder: Path, launch: RankLaunch, on_death: Callable[[str], None]) -> int:
    """Run the ranks until they end; return the signal that ended them early, or 0.

    A rank that dies ends the others, and all start again from the newest checkpoint. The main
    thread must call it, since it handles signals: with the first one the ranks save a checkpoint.

    Args:
        folder: The run, with its recipe and its lists of images.
        launch: Where ranks run.
        on_death: Called with one sentence when a rank of this host has died.

    Raises:
        RanksLostError: They died too often.
    """
    for mark in (RunFolder(folder).failed, RunFolder(folder).stopped):
        mark.unlink(missing_ok=True)
    is_alone = not launch.rendezvous
    # The time that ranks have to save a checkpoint. torch 2.11 does not read it, and gives 30 s.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(GRACE_S) + _LONGER_S)
    config = LaunchConfig(
        min_nodes=launch.min_nodes,
        max_nodes=launch.max_nodes,
        nproc_per_node=launch.num_ranks,
        run_id=launch.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if is_alone else launch.rendezvous,
        local_addr="localhost" if is_alone else None,
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    _hear_of_deaths(on_death)
    # Else all starts share one store, and ranks look for each other where they were before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks warn of those that are gone
    spin_briefly()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun warns without it; ranks set their own
    before = {
        each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        launch_agent(config, sys.executable, ["-m", _MODULE, str(folder)])
    except SignalException as stopped:
        return int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RanksLostError(
            f"rank {rank} died ({_ending(failure.exitcode)}) after {launch.max_restarts} restarts; "
            "--resume goes on from the last checkpoint"
        ) from error
    except (RendezvousError, TimeoutError) as error:
        raise RanksLostError(
            f"the hosts did not meet at {launch.rendezvous or 'this host'}: {error}"
        ) from error
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


def _hear_of_deaths(on_death: Callable[[str], None]) -> None:
    """Silence torchrun's logs, but for the records of ranks that died."""
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(_LOGGERS):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    deaths = logging.getLogger(_DEATHS)
    deaths.setLevel(logging.ERROR)
    deaths.propagate = False
    deaths.handlers = [_DeathHandler(on_death)]


class _DeathHandler(logging.Handler):
    """Turns torchrun's record of a dead rank into a sentence."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_death = on_death

    def emit(self, record: logging.LogRecord) -> None:
        match record.args:
            case (int(exit_code), int(rank), *_):
                self._on_death(f"process {rank} of this host died ({_ending(exit_code)})")


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit status {exit_code}"
