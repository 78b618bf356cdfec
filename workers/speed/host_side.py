"""Runs the process that searches for a faster speed preset, from the front end's event loop.

The process exits with the front end: its standard input ends then.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from inferpool.models.speed.attempts import forget_attempts
from inferpool.models.speed_names import SpeedReport
from inferpool.workers.shared.config import WorkerConfig

_BOOT = (
    "import json, sys; order = json.loads(sys.stdin.readline()); sys.path[:] = order['sys_path']; "
    "from inferpool.workers.speed.search_process import main; main(order)"
)
_STAGE_S = 12 * 3600.0
"""Seconds for one stage. At idle priority beside busy workers a minute may become hours."""
_LEAVE_S = 2.0
"""Seconds to wait for its exit, which needs time that idle priority may not get."""
_MAX_REASON = 300
EXIT_LOST = 70
"""Exit code after the loss of the device's context (EX_SOFTWARE in sysexits.h)."""
_MOST_LOSSES = 4
"""Times that a search begins anew: graphs and each compiled preset may break the device once."""


def compiler_name() -> str:
    """Return the C++ compiler that torch would call."""
    return os.environ.get("CXX", "g++")


def find_compiler() -> str | None:
    """Return the path of the compiler; None if it is not installed."""
    return shutil.which(compiler_name())


class SearchFailedError(Exception):
    """The search has no result; the message says why."""


class SearchLostDeviceError(SearchFailedError):
    """The search has lost the context of its device, as by a capture that breaks it."""


class SearchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to the process, on one line of its standard input."""

    sys_path: list[str]
    config: WorkerConfig
    key: str
    """Key under which the workers' verdict is stored."""


class SearchNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News from the process, one per line of its standard output."""

    stage: str = ""
    found: SpeedReport | None = None
    refused: str = ""


async def search(config: WorkerConfig, key: str, on_progress: Callable[[str], None]) -> SpeedReport:
    """Run a search in a process, and return its verdict, which is also in the cache then.

    A cancellation ends the process, and the compiler that it may have started. What has broken the
    device is left out by the next process.

    Raises:
        SearchFailedError: There is no verdict.
    """
    for _ in range(_MOST_LOSSES):
        with contextlib.suppress(SearchLostDeviceError):
            return await _searched(config, key, on_progress)
    return await _searched(config, key, on_progress)


async def _searched(
    config: WorkerConfig, key: str, on_progress: Callable[[str], None]
) -> SpeedReport:
    # It gets a session of its own, because Ctrl-C is meant for the front end.
    command = (sys.executable, "-P", "-c", _BOOT)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as error:
        raise SearchFailedError(f"the process could not be started: {error.strerror}") from error
    errors = asyncio.create_task(_last_line(process))
    try:
        order = SearchOrder(sys_path=sys.path, config=config, key=key)
        return await _follow(process, order, on_progress, errors)
    finally:
        if process.returncode is None:
            _kill(process.pid)
            if config.cache_dir is not None:
                await asyncio.to_thread(forget_attempts, Path(config.cache_dir), key, process.pid)
        await asyncio.wait([errors, asyncio.create_task(process.wait())], timeout=_LEAVE_S)
        errors.cancel()
        assert process.stdin is not None
        process.stdin.close()


async def _follow(
    process: Process,
    order: SearchOrder,
    on_progress: Callable[[str], None],
    errors: "asyncio.Task[str]",
) -> SpeedReport:
    assert process.stdin is not None
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    try:
        async with asyncio.timeout(_STAGE_S) as limit:
            while line := await process.stdout.readline():
                limit.reschedule(loop.time() + _STAGE_S)
                news = msgspec.json.decode(line, type=SearchNews)
                if news.found is not None:
                    return news.found
                if news.refused:
                    raise SearchFailedError(news.refused)
                on_progress(news.stage)
            code = await process.wait()
            last = await errors
    except TimeoutError:
        raise SearchFailedError(f"it made no progress for {_STAGE_S / 3600:g} hours") from None
    except msgspec.MsgspecError as error:
        raise SearchFailedError(f"its process wrote an invalid message: {error}") from error
    if code == EXIT_LOST:
        raise SearchLostDeviceError(f"the device's context is lost: {last[:_MAX_REASON]}")
    if code < 0:
        raise SearchFailedError(f"its process was ended by signal {-code}")
    raise SearchFailedError(f"its process ended with {code}: {last[:_MAX_REASON]}")


async def _last_line(process: Process) -> str:
    """Return the last line of its standard error, read to the end so that it never blocks."""
    assert process.stderr is not None
    tail: deque[bytes] = deque(maxlen=2)
    while part := await process.stderr.read(1 << 16):
        tail.append(part)
    lines = b"".join(tail).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _kill(pid: int) -> None:
    """Kill it and all that it has started: at idle priority an orderly exit may take long."""
    family = [pid]
    with contextlib.suppress(psutil.Error):
        family += [each.pid for each in psutil.Process(pid).children(recursive=True)]
    for leader in family:  # the compiler and its children are one group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
