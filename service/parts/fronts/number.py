"""The number of fronts."""

import logging

from inferpool.service.errors import StartError
from inferpool.service.settings.settings import Settings

logger = logging.getLogger(__name__)

_MIN_SLOTS = 2
"""Largest bodies that each part of the arena must hold: slots are powers of two, so a body may take
nearly twice its size."""


def number_of_fronts(settings: Settings, num_cores: int, num_gpus: int = 0) -> tuple[int, str]:
    """Return the number of fronts, and the reason for it.

    One process answers some 30,000 small calls per second on a core of its own, and the workers
    need cores too; below eight cores a second front would take its time from them. Per small call
    the main process does some 0.45 of what it does alone, so two fronts can keep it busy. TLS, JSON
    and large bodies cost it nothing: several GPUs, which can compute as much as comes, need more.

    Raises:
        StartError: The arena is too small for that number.
    """
    fitting = max(1, settings.arena_bytes // (_MIN_SLOTS * settings.max_body_bytes))
    if settings.front_ends != "auto":
        num = settings.front_ends
        if num > 1 and num > fitting:
            raise StartError(
                f"front_ends: {num} parts of the arena would each be less than twice "
                f"max_body_bytes; set arena_bytes to "
                f"{num * _MIN_SLOTS * settings.max_body_bytes} or more"
            )
        if num > num_cores:
            logger.warning(
                "front_ends: %d processes take calls on %d cores, which the workers need too: they "
                'take time from each other; "auto" makes it one for every four cores',
                num,
                num_cores,
            )
        return num, "as set by front_ends"
    if all(model.devices == "cpu" for model in settings.models.values()):
        num_gpus = 0
    wanted = settings.num_front_ends(num_cores, num_gpus)
    if wanted > fitting:
        return fitting, f"the arena has no room for {wanted}"
    gpus = f" and {num_gpus} GPUs" if wanted > settings.num_front_ends(num_cores, 0) else ""
    return wanted, f"auto, for {num_cores} cores{gpus}"
