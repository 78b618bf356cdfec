"""Adds up and compares the memory of workers, by place: that of the host, and that of each GPU."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from inferpool.service.errors import VersionRefusedError
from inferpool.workers.host.device_memory import HOST

logger = logging.getLogger(__name__)

Memory = Mapping[str, int]
"""Bytes by place; see `DeviceMemory`."""


def total_of(memories: Sequence[Memory]) -> Memory:
    """Add up memory by place."""
    total: Counter[str] = Counter()
    for memory in memories:
        total.update(memory)
    return total


def fits(needed: Memory, left: Memory) -> bool:
    """Return whether there is enough in each place. A place that is not known has enough."""
    return all(num <= left.get(place, inf) for place, num in needed.items())


def num_fitting(needs: Sequence[Memory], left: Memory) -> int:
    """Return how many workers fit, counted from the first on."""
    taken: Counter[str] = Counter()
    for number, each in enumerate(needs):
        taken.update(each)
        if not fits(taken, left):
            return number
    return len(needs)


def refusal(
    name: str,
    needs: Sequence[Memory],
    left: Memory,
    when: str = "beside what serves",
    cure: str = "",
) -> VersionRefusedError:
    """Return the error for workers that do not fit, with the figures; and log it."""
    needed = total_of(needs)
    place = next(place for place in needed if needed[place] > left.get(place, inf))
    free = max(0, int(left[place]))
    workers = "1 worker needs" if len(needs) == 1 else f"{len(needs)} workers need"
    where = "" if place == HOST else f" of GPU {place}"
    error = VersionRefusedError(
        f"it does not fit into memory: its {workers} about {needed[place] / 2**20:,.0f} MiB"
        f"{where}, and {free / 2**20:,.0f} MiB are free {when}; {cure}lower replicas, "
        "remove a model, or raise the container's limit"
    )
    error.figures = {"needed_bytes": needed[place], "free_bytes": free}
    logger.warning("%s: a version is refused: %s", name, error.message)
    return error


def refusal_for_processes(name: str, num: int, left: int) -> VersionRefusedError:
    """Return the error for workers with more processes and threads than are left; and log it."""
    error = VersionRefusedError(
        f"it needs about {num} processes and threads, and {left} are allowed; lower replicas, "
        "remove a model, or raise the limit (pids.max, ulimit -u)"
    )
    logger.warning("%s: a version is refused: %s", name, error.message)
    return error


def most_of(estimate: Memory, known: Sequence[Memory]) -> Memory:
    """Return the most that a worker may need in each place that it uses."""
    most = {place: max(each.get(place, 0) for each in known) for place in estimate} if known else {}
    return {place: max(num, most.get(place, 0)) for place, num in estimate.items()}
