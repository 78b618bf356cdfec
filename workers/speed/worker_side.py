"""Chooses the speed preset of a worker, and compiles networks for that. Worker processes only.

A network is compiled in a process of its own, for a worker or for a search: so the caller does not
keep the compiler's memory, and survives a compiler that crashes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn

from inferpool.models.accelerator.device import (
    foreign_bytes,
    free_bytes,
    is_accelerator,
    limit_memory,
    most_reserved_bytes,
    select,
)
from inferpool.models.base import Model
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from inferpool.models.speed.choose import choose
from inferpool.models.speed.compiled import compile_network
from inferpool.models.speed.options import AT_START, ON_DEVICE, SpeedOptions
from inferpool.models.speed.trial import Trial
from inferpool.models.speed_names import SpeedReport
from inferpool.models.warm_sizes import largest_batch
from inferpool.workers.inside.own_process import pin
from inferpool.workers.inside.pools import started_pool
from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.guard import die_with_parent
from inferpool.workers.shared.memory import has_room_beside

_BOOT = "import json, sys; order = json.load(sys.stdin); sys.path[:] = order['sys_path']; "
_TIMEOUT_S = 900.0
_WEIGHTS = "weights.pt"
_MAX_REASON = 300
_MOST_OF_FREE = 0.8
"""Part of the free memory of a device that a search may use beside workers."""
_NUM_COPIES = 4
"""Copies of a model on a device that a search may hold: two networks, and weights in between."""
_LEAST_FREE = 8
"""The rest of a search takes an eighth of a device: a context, inner values and graphs."""


def chosen_preset(
    config: WorkerConfig, model: Model, max_batch_size: int, tell: Callable[[str], None]
) -> SpeedReport:
    """Choose the network and the decoder that a loaded model's settings ask for.

    Args:
        config: Configuration of the worker.
        model: Loaded.
        max_batch_size: Most instances that service may compute at once.
        tell: Called with each step, for people.

    Raises:
        ModelError: The preset or decoder that the settings name cannot be used with this model.
    """
    device = config.placement.devices[0]
    options = SpeedOptions(
        speed=config.speed,
        max_batch_size=max_batch_size,
        cache_dir=Path(config.cache_dir) if config.cache_dir else None,
        compile_package=partial(compile_package, config),
        chosen=config.chosen,
        decode=config.decode,
        prepare_threads=config.prepare_threads,
        start_pool=partial(started_pool, shares_openmp=True),
        measures=config.measures_speed or not _has_room(device),
        times=ON_DEVICE if is_accelerator(device) else AT_START,
    )
    return choose(model, options, tell)


def placed_beside(placement: Placement) -> Placement:
    """Bind this process to the device of a worker that serves, and return where it loads a model.

    On an accelerator it may use a part of the memory that is free, so that the worker can grow. On
    CPUs it may run on any core.
    """
    device = placement.devices[0]
    if not is_accelerator(device):
        torch.set_num_threads(placement.num_threads)
        return Placement(devices=("cpu",), num_threads=placement.num_threads)
    pin(placement.for_rank(0))
    select(device)
    free = free_bytes(device)
    limit_memory(device, _MOST_OF_FREE * free / (free + foreign_bytes(device)))
    return placement


def _has_room(device: str) -> bool:
    """Return whether a second process has room on the host, and on the device."""
    if not has_room_beside():
        return False
    if not is_accelerator(device):
        return True
    own, free = most_reserved_bytes(device), free_bytes(device)
    total = free + own + foreign_bytes(device)
    return free >= _NUM_COPIES * own + total / _LEAST_FREE


class CompileError(Exception):
    """The compilation failed; the message says why."""


def compile_package(
    config: WorkerConfig,
    network: nn.Module,
    preset: str,
    path: Path,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Compile a model's network with its present weights, and write the package.

    Raises:
        CompileError: The compilation failed.
    """
    for left_over in path.parent.glob(f"{path.stem}-compiling-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # a compiler was killed
    order = {
        "sys_path": sys.path,
        "source": config.model.source,
        "weights": config.model.weights,
        "options": dict(config.model.options),
        "placement": msgspec.to_builtins(config.placement),
        "max_batch_size": largest_batch(
            config.placement.devices[0], config.max_batch_size, may_grow=config.may_batches_grow
        ),
        "preset": preset,
        "path": str(path),
        "parent": os.getpid(),
    }
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-compiling-", dir=path.parent) as scratch:
        # Pass the weights: they may be random, or their file may have changed.
        torch.save(network.state_dict(), Path(scratch, _WEIGHTS))
        command = [
            sys.executable,
            "-P",
            "-c",
            f"{_BOOT}from inferpool.workers.speed.worker_side import main; main(order)",
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=Path.cwd(),
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
            text=True,
        )
        try:
            text = json.dumps({**order, "scratch": scratch})
            _, errors = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileError(f"compiling took more than {timeout_s:g} s") from None
        finally:
            _end(process)
    if process.returncode:
        last = (errors.strip().splitlines() or [_described(process.returncode)])[-1]
        raise CompileError(f"compiling failed: {last[:_MAX_REASON]}")


def main(order: dict[str, object]) -> None:
    """Compile a network, in the process for that."""
    die_with_parent(int(str(order["parent"])))
    placement = msgspec.convert(order["placement"], Placement)
    options = order["options"]
    assert isinstance(options, dict)
    weights = order["weights"]
    placement = placed_beside(placement)
    model = build(str(order["source"]), None if weights is None else str(weights), options)
    model.load(placement)
    network = model.network
    assert isinstance(network, nn.Module)
    scratch = Path(str(order["scratch"]))
    network.load_state_dict(
        torch.load(scratch / _WEIGHTS, weights_only=True, map_location=placement.devices[0])
    )
    trial = Trial(model, SpeedOptions(max_batch_size=1))
    compile_network(
        network,
        trial.calibrate,
        str(order["preset"]),
        Path(str(order["path"])),
        scratch,
        max_batch_size=int(str(order["max_batch_size"])),
    )


def _described(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by signal {-code}"


def _end(process: "subprocess.Popen[str]") -> None:
    """Kill it, and the C++ compiler that it may have started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    finally:
        process.wait()
