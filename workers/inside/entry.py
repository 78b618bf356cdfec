"""Entry points of a worker's processes. The front end imports this module: no torch at the top."""

import socket
from mmap import mmap
from typing import TYPE_CHECKING

from inferpool.workers.ranks.wiring import RankEnds
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.guard import die_with_front_end
from inferpool.workers.shared.stacks import record
from inferpool.workers.shared.threads import spin_briefly

if TYPE_CHECKING:
    from inferpool.workers.shared.worker_queue import WorkerQueue


def run(
    config: WorkerConfig,
    inbox: "WorkerQueue",
    outbox: "WorkerQueue",
    arena: mmap,
    row: mmap,
    region: mmap,
    ends: RankEnds | None,
    stacks: int,
    door: socket.socket | None = None,
) -> None:
    """Run a worker, or the lead of a group; see `workers.inside.process.main`."""
    die_with_front_end()
    record(stacks)  # early, since the import of torch may hang too
    spin_briefly()
    from inferpool.workers.inside import process

    process.main(config, inbox, outbox, arena, row, region, ends, door)


def follow(
    config: WorkerConfig,
    outbox: "WorkerQueue",
    row: mmap,
    ends: RankEnds,
    stacks: int,
) -> None:
    """Run a follower of a group; see `workers.inside.follower.main`."""
    die_with_front_end()
    record(stacks)
    spin_briefly()
    from inferpool.workers.ranks import follower

    follower.main(config, outbox, row, ends)
