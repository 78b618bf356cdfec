"""Sets up a process of a worker: signals, log, device, cores and threads. Worker processes only.

It also reports to the front end why a process could not start, or why it exits.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import NoReturn

import torch

from inferpool.models.accelerator.device import limit_memory, module_in_use, use_float32
from inferpool.models.accelerator.failures import lacks_resources, raised
from inferpool.models.accelerator.kinds import accelerator_of, known_accelerators
from inferpool.models.base import Model
from inferpool.models.errors import ModelError, PassesThrough
from inferpool.models.files.modules import line_of
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.texts import text_of, traceback_of
from inferpool.workers.inside.allocator import keep_large_buffers
from inferpool.workers.inside.randomness import seed_anew
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.guard import give_children_defaults, give_way_for_memory
from inferpool.workers.shared.heartbeat import Heartbeat
from inferpool.workers.shared.log_lines import LineHandler, PrintedLines
from inferpool.workers.shared.messages import Leaving, StartFailed
from inferpool.workers.shared.worker_queue import WorkerQueue

logger = logging.getLogger(__name__)

EXIT_ACCELERATOR = 70
"""Exit code after the loss of the device's context (EX_SOFTWARE in sysexits.h)."""
_MAX_TEXT_CHARS = 20_000
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)


class ToldToLeave(PassesThrough):
    """The front end has told this process to leave at once."""


def set_up(heartbeat: Heartbeat, outbox: WorkerQueue) -> None:
    """Leave signals to the front end, and send it the log and all printed text."""
    _guard(heartbeat)
    outbox.send_only()
    _log_to(outbox)
    os.register_at_fork(after_in_child=outbox.leave_to_parent)
    for name, level in (("stdout", logging.INFO), ("stderr", logging.WARNING)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
            lines = PrintedLines(stream, level, outbox.put)
            setattr(sys, name, lines)
            os.register_at_fork(after_in_child=lines.stop_sending)
    if "PYTHONBREAKPOINT" not in os.environ:  # a remote debugger may set it
        sys.breakpointhook = _refuse_breakpoint


def pin(placement: Placement) -> None:
    """Bind this process to its devices, cores and threads, before any device is initialised.

    It also begins the random numbers of this process. Ranks of a group then agree on theirs.
    """
    assert module_in_use() is None, "no device must be initialised before pinning"
    accelerator = accelerator_of(placement.devices[0])
    if accelerator and placement.visible:
        os.environ |= accelerator.environment
        if placement.split:
            os.environ |= accelerator.split_environment
        os.environ[accelerator.visible] = ",".join(placement.visible)
    elif placement.devices == ("cpu",):
        os.environ |= dict.fromkeys((each.visible for each in known_accelerators()), "")
    if placement.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, placement.cpus)
    torch.set_num_threads(placement.num_threads)
    with contextlib.suppress(RuntimeError):  # a user's module has set it, or torch works already
        torch.set_num_interop_threads(1)
    use_float32()
    seed_anew()
    keep_large_buffers()
    if placement.memory_fraction is not None:
        limit_memory(placement.devices[0], placement.memory_fraction)


def build_model(config: WorkerConfig) -> Model:
    """Build the model, ready to be loaded.

    Raises:
        ModelError: It cannot be built.
    """
    seed = torch.initial_seed()
    model = build(config.model.source, config.model.weights, dict(config.model.options))
    model.max_image_pixels = config.max_image_pixels  # its class may have one of its own
    model._runtime = replace(model._runtime, seed=seed, max_batch_tokens=config.max_batch_tokens)
    return model


@contextmanager
def reporting_failures(outbox: WorkerQueue) -> Iterator[None]:
    """End this process and report the error to the front end if the block fails."""
    try:
        yield
    except ModelError as error:
        # With more free memory or descriptors, another start may succeed.
        text = text_of(error, _MAX_TEXT_CHARS)
        outbox.put(StartFailed(text, permanent=not lacks_resources(error)))
    except raised() as error:
        trace = traceback_of(error)  # the front end logs it
        last = trace.rpartition("\n")[2][:_MAX_TEXT_CHARS]
        where = f" ({line})" if (line := line_of(error)) else ""
        outbox.put(StartFailed(f"loading failed: {last}{where}", permanent=False, traceback=trace))
    else:
        return
    os._exit(1)


def leave_device(error: torch.AcceleratorError, outbox: WorkerQueue) -> NoReturn:
    """Report the loss of the device's context, and end this process."""
    logger.critical("the device's context is lost", exc_info=error)
    first_line = text_of(error).partition("\n")[0]
    outbox.put(Leaving("device", f"the device's context is lost: {first_line}"))
    os._exit(EXIT_ACCELERATOR)


def _refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "breakpoint() needs a terminal, which a worker does not have: inferpool serve MODEL --debug"
    )


def _guard(heartbeat: Heartbeat) -> None:
    give_way_for_memory()

    def leave(signum: int, frame: FrameType | None) -> None:
        if heartbeat.must_leave:
            raise ToldToLeave

    signal.signal(signal.SIGTERM, leave)
    # Ctrl-C and what a cgroup is sent reach workers too, but only the front end may end them. A
    # program that a model starts would inherit SIG_IGN, and not such a handler.
    for number in _IGNORED_SIGNALS:
        signal.signal(number, _go_on)
        signal.siginterrupt(number, False)
    # Where there is no forkserver, they were blocked until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, *_IGNORED_SIGNALS))
    give_children_defaults(own=(leave, _go_on))
    # A forked process would wait for OpenMP's threads, which only its parent has.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def _go_on(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def _log_to(outbox: WorkerQueue) -> None:
    root = logging.getLogger()
    root.handlers = [LineHandler(outbox.put)]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # Payloads are mapped read-only on purpose; `Item.tensors` copies for models that write.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    # Clients with damaged metadata would fill the log with Pillow's warnings.
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
