import errno
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from inferpool.workers.shared.memory import SharedMemory, SharedMemoryError
from tests.descriptors import names_open
from tests.groups import ControlGroup, control_group

MIB = 1 << 20
RESERVE = f"""
import resource, sys
from inferpool.workers.shared.memory import SharedMemory, SharedMemoryError
if sys.argv[1:]:
    kind, limit = map(int, sys.argv[1:])
    resource.setrlimit(kind, (limit, limit))
try:
    SharedMemory({64 * MIB}, name="arena", writable=False)
except SharedMemoryError as error:
    print(error)
else:
    print("reserved")
"""


def reserve(*limit: int, enter: Callable[[], None] | None = None) -> str:
    """Reserve 64 MiB in a process with some limit, and return what it prints."""
    command = [sys.executable, "-c", RESERVE, *map(str, limit)]
    done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_page_is_there_before_it_is_used():
    memory = SharedMemory(8 * MIB, name="arena", writable=False)
    assert os.fstat(memory._fd).st_blocks * 512 >= 8 * MIB
    memory.close()


@pytest.mark.parametrize(
    ("kind", "limit", "said"),
    [
        (resource.RLIMIT_FSIZE, MIB, "File too large (ulimit -f)"),
        (resource.RLIMIT_AS, 60 * MIB, "Cannot allocate memory (ulimit -v"),
        (resource.RLIMIT_NOFILE, 3, "Too many open files"),
    ],
)
def test_message_names_the_limit_of_the_process(kind: int, limit: int, said: str):
    text = reserve(kind, limit)
    assert text.startswith("cannot reserve 64 MiB of shared memory for the arena: ")
    assert said in text


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with control_group("memory") as group:
        yield group


def test_limit_of_the_control_group_is_found_before_the_kernel_kills_for_it(group: ControlGroup):
    group.set("memory.limit_in_bytes", 60 * MIB)
    assert "MiB are free" in reserve(enter=group.enter)
    group.set("memory.limit_in_bytes", 200 * MIB)
    assert reserve(enter=group.enter) == "reserved\n"


@pytest.mark.parametrize("num_bytes", [0, MIB])
def test_no_process_can_take_pages_from_under_another_that_has_mapped_them(num_bytes: int):
    memory = SharedMemory(8192, name="ring", writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), num_bytes)
    memory.close()


def test_a_region_that_is_closed_twice_closes_no_descriptor_of_another():
    region = SharedMemory(100, name="first", writable=False)
    region.close()
    with ExitStack() as stack:
        others = [stack.enter_context(open(os.devnull)) for _ in range(8)]
        region.close()
        assert all(os.fstat(each.fileno()) for each in others)


def test_refused_region_leaves_no_descriptor():
    before = set(names_open())
    with pytest.raises(SharedMemoryError):
        SharedMemory(1 << 50, name="arena", writable=False)
    assert len(set(names_open()) - before) <= 1  # the listing's own


@pytest.mark.parametrize("system", ["Linux", "a system without memfd", "a closed /proc"])
def test_descriptor_for_readers_cannot_be_written_to_on_any_system(
    system: str, monkeypatch: pytest.MonkeyPatch
):
    if system == "a system without memfd":
        monkeypatch.delattr(os, "memfd_create")
    if system == "a closed /proc":
        really_open = os.open

        def refuse(path: str, *args: Any, **kwargs: Any) -> int:
            if str(path).startswith("/proc"):
                raise PermissionError(errno.EACCES, "closed")
            return really_open(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    before = names_open()
    memory = SharedMemory(8192, name="arena", writable=False)
    memory.map[:3] = b"abc"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory._given_fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory._given_fd, 8192)
    assert mmap.mmap(memory._given_fd, 8192, access=mmap.ACCESS_READ)[:3] == b"abc"
    memory.close()
    assert names_open() == before
