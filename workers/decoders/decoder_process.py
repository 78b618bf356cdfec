"""Entry point of a decoder. The front end imports this module: no torch at the top.

Decoders prepare instances for one worker, beside it, so that its GIL does not limit how many
instances a device gets. The front end starts them like the ranks of a worker, so that they end with
it, and with the front end; a worker could not fork any more once it has initialised its device.
"""

from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from inferpool.workers.decoders.ring import RingLayout
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.guard import die_with_front_end
from inferpool.workers.shared.stacks import record

if TYPE_CHECKING:
    from inferpool.workers.shared.worker_queue import WorkerQueue


def decode(
    config: WorkerConfig,
    seat: int,
    tasks: Connection,
    answers: Connection,
    outbox: "WorkerQueue",
    arena: mmap,
    ring: mmap,
    layout: RingLayout,
    row: mmap,
    stacks: int,
) -> None:
    """Run a decoder; see `workers.beside.decoding.main`."""
    die_with_front_end()
    record(stacks)  # early, since the import of torch may hang too
    from inferpool.workers.decoders import decoder as decoding

    decoding.main(config, seat, tasks, answers, outbox, arena, ring, layout, row)
