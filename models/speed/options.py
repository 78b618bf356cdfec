"""Settings that decide how a network is made faster, and the clocks and times of trials."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from inferpool.models.speed.compiled import Compiled
from inferpool.models.speed_names import SpeedReport

Clock = Callable[[], float]
"""Returns the time in seconds."""
CompilePackage = Callable[[nn.Module, str, Path], None]
"""Compiles a network for a preset and writes the package to a path; raises if it cannot."""
LoadPackage = Callable[[Path, nn.Module | None, torch.device], nn.Module]
"""Loads a compiled package on a device; the network is for inputs of other shapes than the compiled
ones."""
StartPool = Callable[[int, str], Executor]
"""Starts a number of threads, which have a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimes:
    """The clocks of trials, and the time for each step; by default those of a start."""

    clock: Clock = time.perf_counter
    """Measures networks."""
    decode_clock: Clock | None = None
    """Measures ways to decode. By default it is the thread's processor time on a CPU, where other
    processes must not count, and the time that passes on an accelerator."""
    now: Clock = time.monotonic
    """Measures how long all trials take."""
    budget_s: float = 10.0
    """Time for trying presets; those not judged by then are left out."""
    compare_s: float = 1.5
    """Samples are compared until the exact network has taken this long for them."""
    rounds_s: float = 0.5
    """Time for one preset at one batch size, once there are a few rounds."""
    batch_s: float = 0.25
    """Longest batch for timing; larger ones are made smaller, so that several fit into the time."""
    calibration_s: float = 2.0
    """Longest batch for a look at the exact network's inner values."""


AT_START = TrialTimes()
BESIDE = TrialTimes(clock=time.process_time, budget_s=math.inf, compare_s=6.0, rounds_s=2.0)
"""Times beside workers, which get the cores first: so processor time counts, and nobody waits."""
ON_DEVICE = TrialTimes(budget_s=math.inf, compare_s=math.inf, rounds_s=math.inf)
"""Times on an accelerator. The work is bounded by numbers of samples and rounds, so that a slow
moment leaves out no preset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """Settings that decide how a network is made faster."""

    speed: str = "auto"
    """One of `speed_names.CHOICES`."""
    max_batch_size: int
    """Most instances in a forward pass."""
    cache_dir: Path | None = None
    """Folder for verdicts and compiled packages; None keeps none."""
    compile_package: CompilePackage | None = None
    load_package: LoadPackage = Compiled
    chosen: SpeedReport | None = None
    """Choice of an earlier incarnation of this worker, to be applied without trying again."""
    decode: str = "exact"
    """One of `speed_names.DECODE_CHOICES`."""
    prepare_threads: int = 1
    """Threads that preprocess instances."""
    start_pool: StartPool = ThreadPoolExecutor
    """Starts threads with the settings of this one."""
    measures: bool = True
    """With `auto`, measure what the cache has no verdict on. Otherwise `exact` serves meanwhile."""
    times: TrialTimes = AT_START
    """Clocks, and the time for each step."""
