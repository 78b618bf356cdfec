"""How many requests the next batch may have: as many as its deadlines and the settings allow. Pure.

A batch takes longer the more it has, and its first member is answered with its last. So a batch
does not grow past what the tightest deadline among its members allows. One whose deadline cannot be
met by a batch of its own is not looked at: it would only slow down the others.
"""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.batch_costs import CostCurve
    from service.batcher import Batcher, Q

SPARE = 1.2
"""What the time of a batch is multiplied with: batches vary, and half of them take longer."""


def fitting(queue: "Batcher[Q]", most: int, begin: float, curve: "CostCurve") -> int:
    """The size of the next batch, such that each of its members that can be in time is.

    Where no deadline is near, this costs the same whatever the size.

    Args:
        queue: Those that wait; at least one.
        most: The largest size.
        begin: When the worker will begin with it.
        curve: What it takes the worker.
    """
    if begin + curve.time_s(most) * SPARE <= queue.soonest():
        return most
    alone_s = curve.time_s(1) * SPARE
    num, allowed, tightest = 0, most, inf
    for request in islice(queue, most):
        deadline = request.deadline
        if deadline < tightest and begin + alone_s <= deadline:
            fits = curve.size_within((deadline - begin) / SPARE, allowed)
            if num >= fits:
                break  # it would make the batch too large for itself
            allowed, tightest = fits, deadline
        if num == allowed:
            break
        num += 1
    return num
