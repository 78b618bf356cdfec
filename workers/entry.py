"""Where a worker process begins: named by the front end, so it imports torch only once it runs."""

from mmap import mmap
from typing import TYPE_CHECKING

from workers.config import WorkerConfig
from workers.stacks import record

if TYPE_CHECKING:
    from workers.worker_queue import WorkerQueue


def run(
    config: WorkerConfig,
    inbox: "WorkerQueue",
    outbox: "WorkerQueue",
    arena: mmap,
    row: mmap,
    region: mmap,
    stacks: int,
) -> None:
    """Run one incarnation of a worker; see `workers.process.main`."""
    record(stacks)  # first: importing torch may take its time too
    from workers import process

    process.main(config, inbox, outbox, arena, row, region)
