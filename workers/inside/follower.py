"""All that a rank runs which follows another: load its part, and compute it whenever it is called.

It knows nothing of batches and requests: the lead of its group does, and calls it by way of the
network that both have parts of.
"""

import gc
import logging
import os
from mmap import mmap

import torch

from inferpool.models.base import load_model
from inferpool.models.split.network import serve
from inferpool.models.texts import described
from inferpool.workers.config import WorkerConfig
from inferpool.workers.heartbeat import Heartbeat
from inferpool.workers.inside.allocator import give_back
from inferpool.workers.inside.group import Group
from inferpool.workers.inside.own_process import (
    build_model,
    failing_as_told,
    leave_device,
    name_of,
    pin,
    set_up,
)
from inferpool.workers.inside.worker_queue import WorkerQueue
from inferpool.workers.messages import Leaving, RankReady
from inferpool.workers.wiring import RankEnds

logger = logging.getLogger(__name__)


def main(config: WorkerConfig, outbox: WorkerQueue, row: mmap, ends: RankEnds) -> None:
    """Run one rank of an incarnation, from its first instruction to its exit.

    Args:
        config: What to serve and where, as the lead has it.
        outbox: Messages to the front end.
        row: The heartbeat, mapped for writing.
        ends: How it reaches the other ranks.
    """
    heartbeat = Heartbeat(row)
    set_up(heartbeat, outbox)
    with failing_as_told(outbox):
        pin(config.placement.for_rank(ends.rank))
        group = Group(ends, config.placement)
        model = build_model(config, group)
        load_model(model, config.placement)
        network = model.split_network
        assert network is not None
        device = config.placement.devices[ends.rank]
        ready = RankReady(name_of(device), network.part)
    give_back()
    gc.freeze()  # what is loaded now stays: later collections need not walk through it
    heartbeat.beat()
    try:
        outbox.put(ready)
        serve(network, heartbeat.beat)
        group.let_go()  # the next stage of a pipeline listens to this one
        os._exit(0)
    except BrokenPipeError:
        os._exit(0)  # the front end is gone
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except torch.AcceleratorError as error:
        leave_device(error, outbox)
    except BaseException as error:
        logger.critical("the part of rank %d failed", ends.rank, exc_info=True)
        outbox.put(Leaving("exit", f"its part failed: {described(error)}"))
        os._exit(1)
