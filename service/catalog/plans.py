"""Decides where the workers of each model go, and what they are told."""

import logging
from collections.abc import Sequence

from inferpool.models.spec import Placement
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.config import WorkerConfig
from inferpool.workers.host.devices import Host

logger = logging.getLogger(__name__)


def plan_all(
    settings: Settings, host: Host, cache_dir: str | None
) -> dict[str, list[WorkerConfig]]:
    """Return the configurations of the workers of each model of the settings.

    Raises:
        DeviceError: A device is missing, or there are too few.
    """
    plans = {name: plan_model(name, settings, host, cache_dir) for name in settings.models}
    if len(plans) > 1:
        shares = [f"{name} {_threads_text(configs)}" for name, configs in plans.items()]
        text = "%d models share %d cores; replicas x threads: %s"
        logger.info(text, len(plans), host.num_cores, ", ".join(shares))
    return plans


def plan_model(
    name: str,
    settings: Settings,
    host: Host,
    cache_dir: str | None,
    *,
    is_successor: bool = False,
) -> list[WorkerConfig]:
    """Return the configurations of the workers of one model of the settings.

    If it `is_successor` of a version that serves, it is compared with that one. So its workers
    measure speed before they are ready, while those of other models leave that to the search.

    Raises:
        DeviceError: A device is missing, or there are too few.
    """
    model = settings.models[name]
    if model.split and model.speed == "auto":
        logger.info("%s speed: exact, as a split model is served", name)
    searches_speed = settings.speed_search and cache_dir is not None and not is_successor
    return [
        model.worker_config_for(
            name,
            placement,
            max_image_pixels=settings.max_image_pixels,
            cache_dir=cache_dir,
            searches_speed=searches_speed,
            error_detail="text" if settings.show_errors else "name",
        )
        for placement in settings.placements_of(name, host)
    ]


def with_model(settings: Settings, name: str, model: ModelSettings | None) -> Settings:
    """Return settings in which a model is another one, is new, or is missing (None)."""
    models = {each: value for each, value in settings.models.items() if each != name}
    if model is not None:
        models = dict(settings.models) | {name: model}
    return settings.model_copy(update={"models": models})


def placement_text(placement: Placement) -> str:
    """Return a placement and how it is split, for people."""
    return f"{placement} ({placement.split})" if placement.split else str(placement)


def _threads_text(configs: Sequence[WorkerConfig]) -> str:
    most = max(config.placement.num_threads * config.placement.num_ranks for config in configs)
    return f"{len(configs)} x {most}"
