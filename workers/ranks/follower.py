"""Main program of a follower rank: it loads its part of the model and computes it when called.

It knows nothing of batches and requests. The lead of its group does, and calls it through the
network that they share.
"""

import gc
import logging
import os
from collections.abc import Callable
from mmap import mmap

import torch

from inferpool.models.accelerator.device import name_of
from inferpool.models.base import load_model
from inferpool.models.files.opened import OpenedFiles
from inferpool.models.runtime import SplitNetwork
from inferpool.models.texts import described
from inferpool.workers.inside.allocator import give_back
from inferpool.workers.inside.own_process import (
    ToldToLeave,
    leave_device,
    pin,
    reporting_failures,
    set_up,
)
from inferpool.workers.ranks.group import Group
from inferpool.workers.ranks.wiring import RankEnds
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.messages import Leaving, RankReady
from inferpool.workers.shared.worker_queue import WorkerQueue

logger = logging.getLogger(__name__)

_POLL_S = 1.0


def main(config: WorkerConfig, outbox: WorkerQueue, row: mmap, ends: RankEnds) -> None:
    """Run one rank of an incarnation, from its first instruction to its exit.

    Args:
        config: Configuration of the worker, the same as the lead's.
        outbox: Messages to the front end.
        row: Heartbeat, mapped for writing.
        ends: Connections to the other ranks.
    """
    heartbeat = Heartbeat(row)
    set_up(heartbeat, outbox)
    with reporting_failures(outbox):
        pin(config.placement.for_rank(ends.rank))
        group = Group(ends, config.placement)
        opened = OpenedFiles(config.model.source)
        with opened.noting():
            model = group.build_model(config)
            load_model(model, config.placement)
        network = model._runtime.split_network
        assert network is not None
        ready = RankReady(name_of(str(group.device)), network.part, opened.marks())
    give_back()
    gc.freeze()  # loaded objects stay, so later collections can skip them
    heartbeat.beat()
    try:
        outbox.put(ready)
        serve(network, heartbeat.beat)
        group.let_go()  # the next stage of a pipeline listens to this one
        os._exit(0)
    except BrokenPipeError:
        os._exit(0)  # the front end is gone
    except ToldToLeave:
        os._exit(0)
    except torch.AcceleratorError as error:
        leave_device(error, outbox)
    except BaseException as error:
        logger.critical("the part of rank %d failed", ends.rank, exc_info=True)
        outbox.put(Leaving("exit", f"its part failed: {described(error)}"))
        os._exit(1)


def serve(network: SplitNetwork, on_beat: Callable[[], None]) -> None:
    """Compute this rank's part of each call, until the lead has no more. On followers.

    Args:
        network: The part of this rank.
        on_beat: Called after each call, and every second without one.

    Raises:
        torch.AcceleratorError: The device's context is lost.
    """
    while True:
        try:
            network.serve_next(_POLL_S)
        except TimeoutError:
            pass
        except EOFError:
            return
        on_beat()
