"""The process that searches for a faster speed preset beside the workers, at low priority."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from inferpool.models.errors import ModelError
from inferpool.workers.shared.guard import give_children_defaults
from inferpool.workers.speed.host_side import EXIT_LOST, SearchNews, SearchOrder

_COMPILE_S = 11 * 3600.0
"""Less than the time that the front end allows for a stage."""
_NICE = 10
"""A tenth of a core beside a busy worker (sched(7)), so that it takes minutes and not hours."""
_MAX_NICE = 19


def main(message: dict[str, object]) -> None:
    """Follow the order, report the progress, and exit; exit at once when the front end is gone."""
    signal.signal(signal.SIGTERM, _leave)
    # `systemctl kill` sends it, which is the front end's alone, to all processes.
    signal.signal(signal.SIGUSR2, _go_on)
    give_children_defaults(own=[_leave, _go_on])
    # So that models and native libraries cannot print into the news.
    news = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = msgspec.convert(message, SearchOrder)
    chosen, devices = order.config.chosen, order.config.placement.devices
    # At idle priority launches on a device would seem to take longer than in a worker.
    give_way(to_everything=devices == ("cpu",) and not (chosen and chosen.is_provisional))
    threading.Thread(target=_watch_front_end, name="front-end-watch", daemon=True).start()

    def say(told: SearchNews) -> None:
        news.write(msgspec.json.encode(told) + b"\n")
        news.flush()

    say(SearchNews(stage=f"loading {order.config.model.source}"))
    _search(order, say)


def give_way(*, to_everything: bool) -> None:
    """Yield to workers, and be the first to be killed when memory runs out.

    Compiling takes minutes, so it gives way to everything: it uses only idle time of the cores.
    """
    nice = _MAX_NICE if to_everything else _NICE
    os.nice(nice)
    if sys.platform != "linux":
        return
    if to_everything:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # With autogroups, priorities count only within a session (sched(7)), and this is one.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _search(order: SearchOrder, say: Callable[[SearchNews], None]) -> None:
    import torch

    from inferpool.models.accelerator.device import is_accelerator
    from inferpool.models.sources.registry import build
    from inferpool.models.speed.options import BESIDE, ON_DEVICE, SpeedOptions
    from inferpool.models.speed.search import SearchError, search
    from inferpool.models.warm_sizes import largest_batch
    from inferpool.workers.speed.worker_side import compile_package, placed_beside

    config = order.config
    device = config.placement.devices[0]
    try:
        placement = placed_beside(config.placement)
        model = build(config.model.source, config.model.weights, dict(config.model.options))
        model.max_image_pixels = config.max_image_pixels
        model.load(placement)
        assert config.cache_dir is not None
        options = SpeedOptions(
            max_batch_size=largest_batch(
                device, config.max_batch_size, may_grow=config.may_batches_grow
            ),
            cache_dir=Path(config.cache_dir),
            compile_package=partial(compile_package, config, timeout_s=_COMPILE_S),
            chosen=config.chosen,
            decode=config.decode,
            prepare_threads=config.prepare_threads,
            times=ON_DEVICE if is_accelerator(device) else BESIDE,
        )
        found = search(model, options, order.key, lambda stage: say(SearchNews(stage=stage)))
        say(SearchNews(found=found))
    except (ModelError, SearchError) as error:
        say(SearchNews(refused=str(error)))
    except torch.AcceleratorError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(EXIT_LOST)  # an exit in order may wait for the device


def _go_on(signum: int, _: FrameType | None) -> None:
    """Ignore a signal."""


def _leave(signum: int, frame: FrameType | None) -> None:
    """Exit in order, which ends the compiler and removes the mark of the attempt."""
    raise SystemExit(128 + signum)


def _watch_front_end() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
