"""Anonymous shared memory, made by the front end and mapped by its workers.

It is a memfd: nothing is left behind however its owners die, and the size of /dev/shm (by default
64 MiB in a container) does not limit it.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
import tempfile
from multiprocessing import reduction

import psutil

from inferpool.workers.shared.cgroups import read_limits

_CHECKED_BYTES = 1 << 20
"""Least size that is compared with the free memory first."""
_CLOSED = -1
"""Stands for a descriptor that is closed."""


class SharedMemoryError(Exception):
    """There is too little memory; the message says how much was requested and what to do."""


class SharedMemory:
    """A region that can be passed to child processes as an argument.

    It is pickled as a descriptor, and mapped again in the child. Unless it is `writable`, the
    descriptor is one that was opened for reading, since a mapping keeps its descriptor open: what
    a model's code writes there by mistake changes nothing.
    """

    def __init__(
        self, num_bytes: int, *, name: str, writable: bool, is_reserved: bool = True
    ) -> None:
        """Create the region.

        Args:
            num_bytes: Its size.
            name: Name in /proc/PID/maps, for people.
            writable: Whether children may write to it.
            is_reserved: Reserve all pages now instead of each at its first write.

        Raises:
            SharedMemoryError: There is too little memory.
        """
        self.num_bytes = num_bytes
        self._writable = writable
        try:
            # The kernel would reserve page by page until none is left, and then kill a process.
            available = (
                available_bytes() if is_reserved and num_bytes > _CHECKED_BYTES else num_bytes
            )
            if num_bytes > available:
                reason = f"{available >> 20} MiB are free"
                raise SharedMemoryError(_refusal(name, num_bytes, reason))
            self._fd, self._given_fd = _opened(name, writable=writable)
        except OSError as error:
            raise SharedMemoryError(_refusal(name, num_bytes, _explain(error))) from error
        try:
            if is_reserved and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, num_bytes)
            else:
                os.ftruncate(self._fd, num_bytes)
            _fix_size(self._fd)
            self.map = mmap.mmap(self._fd, num_bytes)
        except OSError as error:
            self._close_descriptors()
            raise SharedMemoryError(_refusal(name, num_bytes, _explain(error))) from error

    @property
    def writable(self) -> "WritableMemory":
        """Argument for a child that may write to it, even if other children may not."""
        return WritableMemory(self._fd, self.num_bytes)

    def fileno(self) -> int:
        """Return its descriptor, for another way to pass it on."""
        return self._fd

    def close(self) -> None:
        """Unmap the region here; it exists as long as a worker maps it. Twice does nothing more."""
        with contextlib.suppress(BufferError):  # views keep the mapping alive
            self.map.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        descriptors = {self._fd, self._given_fd} - {_CLOSED}
        self._fd = self._given_fd = _CLOSED  # their numbers may become those of other files
        for descriptor in descriptors:
            os.close(descriptor)

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the descriptor to the process that is being started."""
        return attach, (reduction.DupFd(self._given_fd), self.num_bytes, self._writable)


class WritableMemory:
    """A region as an argument for a process that may write to it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._num_bytes = num_bytes

    def __reduce__(self) -> tuple[object, ...]:
        """Pass the descriptor to the process that is being started."""
        return attach, (reduction.DupFd(self._fd), self._num_bytes, True)


def attach(descriptor: object, num_bytes: int, writable: bool) -> mmap.mmap:
    """Map a region in the process that it was passed to."""
    fd: int = descriptor.detach()  # type: ignore[attr-defined]  # DupFd is a factory of two classes
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, num_bytes, access=access)
    finally:
        os.close(fd)


def _opened(name: str, *, writable: bool) -> tuple[int, int]:
    """Return a descriptor of a new region, and the one for other processes.

    Unless those may write, theirs is opened for reading alone. A seal would do the same, and forbid
    new mappings for writing here, too.
    """
    if writable:
        fd = open_anonymous(name)
        return fd, fd
    if hasattr(os, "memfd_create"):
        fd = open_anonymous(name)
        try:
            return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
                raise
    with tempfile.NamedTemporaryFile(prefix=f"inferpool-{name}-") as file:  # no /proc for us
        given_fd = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.dup(file.fileno()), given_fd
        except OSError:
            os.close(given_fd)
            raise


def _fix_size(fd: int) -> None:
    """Seal the size: a process that truncates a region would kill all that read what is gone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox that has no seals
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _explain(error: OSError) -> str:
    """Return the system's error, and the limit that may be its cause."""
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
    """Return the memory that the host and our control groups still allow this process.

    Page cache counts as available, since the kernel frees it on demand.
    """
    available: int = psutil.virtual_memory().available
    left = read_limits().memory_left_bytes
    return available if left is None else min(available, left)


def has_room_beside() -> bool:
    """Return whether a second process like this one would have room to load and to work."""
    needed: int = 2 * psutil.Process().memory_info().rss
    return available_bytes() >= needed


def open_anonymous(name: str) -> int:
    """Return a descriptor of anonymous memory without pages; the name is only for people."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"inferpool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=f"inferpool-{name}-") as file:
        return os.dup(file.fileno())
