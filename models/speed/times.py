"""Clocks of trials, and the time for each step. No torch."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns the time in seconds."""


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
