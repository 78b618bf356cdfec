"""The first function of a front's process, in a module that costs nothing to import."""

import socket
from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferpool.service.fronts.messages import Job


def run(
    job: "Job", memory: mmap, reader: Connection, writer: Connection, channel: socket.socket
) -> None:
    """Be a front until told to leave, or until the main process ends.

    Args:
        job: What to do.
        memory: The arena, mapped for writing.
        reader: What the main process says.
        writer: What it is told.
        channel: Where connections come from.
    """
    from inferpool.service.fronts import front

    front.run(job, memory, reader, writer, channel)
