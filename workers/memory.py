"""Anonymous shared memory: made by the front end, mapped by its workers, named nowhere.

It is a memfd, so nothing of it is left behind however its owners die, and the size of /dev/shm (64
MiB in a container by default) does not bound it.
"""

import contextlib
import errno
import mmap
import os
import tempfile
from multiprocessing import reduction

import psutil

from inferpool.workers.cgroups import read_limits

_CHECKED_BYTES = 1 << 20
"""Smaller regions are not worth a look at how much is free."""


class SharedMemoryError(Exception):
    """The memory could not be had; the message says how much was asked for and what to do."""


class SharedMemory:
    """A region that a process passes to its children as an argument of theirs.

    Pickling it while a process is being started hands that process the descriptor; there it is
    mapped anew, read-only unless `writable`.
    """

    def __init__(
        self, num_bytes: int, *, name: str, writable: bool, is_reserved: bool = True
    ) -> None:
        """Create the region.

        Args:
            num_bytes: Its size.
            name: For people who read /proc/PID/maps.
            writable: Whether children may write to it.
            is_reserved: All of its pages are had now, rather than each when it is first written.

        Raises:
            SharedMemoryError: The pages are not to be had.
        """
        self.num_bytes = num_bytes
        self._writable = writable
        try:
            # The kernel reserves page by page until it has none left, and then kills somebody.
            available = (
                available_bytes() if is_reserved and num_bytes > _CHECKED_BYTES else num_bytes
            )
            if num_bytes > available:
                reason = f"{available >> 20} MiB are free"
                raise SharedMemoryError(_refusal(name, num_bytes, reason))
            self._fd = open_anonymous(name)
        except OSError as error:
            raise SharedMemoryError(_refusal(name, num_bytes, _explain(error))) from error
        try:
            if is_reserved and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, num_bytes)
            else:
                os.ftruncate(self._fd, num_bytes)
            self.map = mmap.mmap(self._fd, num_bytes)
        except OSError as error:
            os.close(self._fd)
            raise SharedMemoryError(_refusal(name, num_bytes, _explain(error))) from error

    @property
    def writable(self) -> "WritableMemory":
        """What to pass to a child that is to write to it, whatever other children may."""
        return WritableMemory(self._fd, self.num_bytes)

    def close(self) -> None:
        """Unmap the region here; workers that still map it keep it alive."""
        with contextlib.suppress(BufferError):  # some of it is still looked at: it goes with that
            self.map.close()
        os.close(self._fd)

    def __reduce__(self) -> tuple[object, ...]:
        """Hand the descriptor to the process that is being started."""
        return attach, (reduction.DupFd(self._fd), self.num_bytes, self._writable)


class WritableMemory:
    """A region on its way into a process that may write to it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._num_bytes = num_bytes

    def __reduce__(self) -> tuple[object, ...]:
        """Hand the descriptor to the process that is being started, as a mapping."""
        return attach, (reduction.DupFd(self._fd), self._num_bytes, True)


def attach(descriptor: object, num_bytes: int, writable: bool) -> mmap.mmap:
    """Map a region in the process that it was handed to."""
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, num_bytes, access=access)
    finally:
        os.close(fd)


def _explain(error: OSError) -> str:
    """What the system says, and which limit it may mean."""
    limits = {
        errno.EFBIG: " (ulimit -f)",
        errno.EMFILE: " (ulimit -n)",
        errno.ENOMEM: " (ulimit -v, or the host's memory)",
    }
    return f"{error.strerror}{limits.get(error.errno or 0, '')}"


def _refusal(name: str, num_bytes: int, reason: str) -> str:
    return (
        f"cannot reserve {num_bytes / 2**20:.0f} MiB of shared memory for the {name}: {reason}; "
        "free some, raise the container's memory limit, or ask for less"
    )


def available_bytes() -> int:
    """Memory that this process could still get: of the host, and of its control groups.

    Page cache counts as available: the kernel gives it up when asked.
    """
    available: int = psutil.virtual_memory().available
    left = read_limits().memory_left_bytes
    return available if left is None else min(available, left)


def open_anonymous(name: str) -> int:
    """A file descriptor of memory that has a name for people only, and no pages yet."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"inferpool-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=f"inferpool-{name}-") as file:
        return os.dup(file.fileno())
