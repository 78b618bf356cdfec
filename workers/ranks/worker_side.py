"""Entry points of the ranks of a worker. The front end imports this module: no torch at the top."""

from collections.abc import Mapping
from mmap import mmap
from typing import TYPE_CHECKING

from inferpool.workers.inside.entry import begin
from inferpool.workers.ranks.wiring import RankEnds
from inferpool.workers.shared.config import WorkerConfig

if TYPE_CHECKING:
    from inferpool.workers.shared.worker_queue import WorkerQueue


def lead(
    ends: RankEnds,
    config: WorkerConfig,
    inbox: "WorkerQueue",
    outbox: "WorkerQueue",
    arena: mmap,
    row: mmap,
    region: mmap,
    stacks: int,
    attachments: Mapping[str, object],
) -> None:
    """Run rank 0: a worker like others, with a model and a loop of its group."""
    begin(stacks)
    from inferpool.workers.inside import process
    from inferpool.workers.ranks.lead import Lead

    rank = Lead(ends)
    parts = (config, inbox, outbox, arena, row, region, attachments)
    process.main(*parts, build=rank.build, make_loop=rank.make_loop)


def follow(
    ends: RankEnds, config: WorkerConfig, outbox: "WorkerQueue", row: mmap, stacks: int
) -> None:
    """Run a rank that follows the lead; see `workers.ranks.follower.main`."""
    begin(stacks)
    from inferpool.workers.ranks import follower

    follower.main(config, outbox, row, ends)
