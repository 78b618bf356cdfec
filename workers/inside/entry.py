"""Entry points of a worker's processes. The front end imports this module: no torch at the top."""

from collections.abc import Mapping
from mmap import mmap
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.guard import die_with_front_end
from inferpool.workers.shared.stacks import record
from inferpool.workers.shared.threads import spin_briefly

if TYPE_CHECKING:
    from inferpool.workers.shared.worker_queue import WorkerQueue


def queue_of(reader: Connection, writer: Connection) -> "WorkerQueue":
    """Return the end of a `PrivateQueue` in the process that it was passed to."""
    from inferpool.workers.shared.worker_queue import WorkerQueue

    return WorkerQueue(reader, writer)


class StartedProcess(BaseProcess):
    """A process of a worker, as it is in that process: it knows no way to start one."""

    _start_method: ClassVar[None] = None
    """Leave the default to Python: model code starts processes as it would in any script."""


def begin(stacks: int) -> None:
    """Do what each process of a worker does before it imports torch, which may hang too."""
    die_with_front_end()
    record(stacks)
    spin_briefly()


def run(
    config: WorkerConfig,
    inbox: "WorkerQueue",
    outbox: "WorkerQueue",
    arena: mmap,
    row: mmap,
    region: mmap,
    stacks: int,
    attachments: Mapping[str, object],
) -> None:
    """Run a worker; see `workers.inside.process.main`."""
    begin(stacks)
    from inferpool.workers.inside import process

    process.main(config, inbox, outbox, arena, row, region, attachments)


def run_main(stacks: int, main: str, *args: object) -> None:
    """Run a process of a part.

    Args:
        stacks: See `record`.
        main: Place of its main function, in a module that may import torch.
        args: Arguments of that.
    """
    begin(stacks)
    resolve_name(main)(*args)
