"""Decides where the workers of each model go, and what they are told."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.engine import WorkerId
from inferpool.workers.shared.config import WorkerConfig

logger = logging.getLogger(__name__)


class HostPlans:
    """Plans the workers of models on this host alone, or on all hosts of a cluster."""

    def __init__(self, host: Host | None, cache_dir: str | None) -> None:
        """Plan for the devices of this host; None: hosts of a cluster join later.

        `cache_dir` is the folder of verdicts on speed. Agents have folders of their own.
        """
        self.is_cluster = host is None
        self._hosts = {} if host is None else {"": host}
        self._cache_dir = None if self.is_cluster else cache_dir

    @property
    def has_hosts(self) -> bool:
        """There is a host for workers."""
        return bool(self._hosts)

    def join(self, name: str, host: Host) -> None:
        """Plan workers on this host too."""
        self._hosts[name] = host

    def leave(self, name: str) -> None:
        """Plan no workers on a host any more."""
        self._hosts.pop(name, None)

    def plan_all(self, settings: Settings) -> Mapping[str, Sequence[WorkerConfig]]:
        """Return the configurations of the workers of each model of the settings.

        Raises:
            DeviceError: A device is missing, or there are too few.
        """
        plans = {name: self.plan(name, settings) for name in settings.models}
        if len(plans) > 1 and not self.is_cluster:
            shares = [f"{name} {_threads_text(configs)}" for name, configs in plans.items()]
            text = "%d models share %d cores; replicas x threads: %s"
            logger.info(text, len(plans), self._hosts[""].num_cores, ", ".join(shares))
        return plans

    def plan(
        self, name: str, settings: Settings, *, is_successor: bool = False
    ) -> list[WorkerConfig]:
        """Return the configurations of the workers of one model; none if there is no host yet.

        Args:
            name: The model, one of the settings.
            settings: The settings.
            is_successor: See `plan_model`.

        Raises:
            DeviceError: A device is missing, in a cluster on every host; or the model is to take
                turns there.
        """
        if self.is_cluster and settings.models[name].share is not None:
            raise DeviceError(
                f"{name}: models take turns at devices only without a cluster; leave out share, or "
                "cluster_port"
            )
        configs: list[WorkerConfig] = []
        missing: DeviceError | None = None
        for host in self._hosts:
            try:
                configs += self.plan_on(host, name, settings, is_successor=is_successor)
            except DeviceError as error:
                if not self.is_cluster:
                    raise
                missing = error
        if missing is not None and not configs:
            raise missing
        return configs

    def plan_on(
        self, host: str, name: str, settings: Settings, *, is_successor: bool = False
    ) -> list[WorkerConfig]:
        """Return the configurations of the workers of one model on one of the hosts.

        Raises:
            DeviceError: A device is missing there, or there are too few.
        """
        try:
            plan = plan_model(
                name, settings, self._hosts[host], self._cache_dir, is_successor=is_successor
            )
        except DeviceError as error:
            if self.is_cluster:
                logger.warning("%s cannot be served on host %s: %s", name, host, error)
            raise
        return [replace(config, host=host) for config in plan] if host else plan


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
    # Workers on equal placements share a configuration: to make each its own would hold up the
    # event loop where there are a thousand.
    make = cache(
        partial(
            model.worker_config_for,
            name,
            max_image_pixels=settings.max_image_pixels,
            cache_dir=cache_dir,
            searches_speed=settings.speed_search and cache_dir is not None and not is_successor,
            error_detail="text" if settings.show_errors is True else "name",
        )
    )
    return [make(placement) for placement in settings.placements_of(name, host)]


def with_model(settings: Settings, name: str, model: ModelSettings | None) -> Settings:
    """Return settings in which a model is another one, is new, or is missing (None)."""
    models = {each: value for each, value in settings.models.items() if each != name}
    if model is not None:
        models = dict(settings.models) | {name: model}
    return settings.model_copy(update={"models": models})


def place_text(config: WorkerConfig) -> str:
    """Return where a worker runs and how it is split, for people."""
    placement = config.placement
    text = f"{placement} ({placement.split})" if placement.split else str(placement)
    return f"{config.host} {text}" if config.host else text


def planned(name: str, version: int, configs: Sequence[WorkerConfig]) -> list[tuple[str, str]]:
    """Return each worker of a version that is started as planned, and where it runs, for people."""
    ids = [WorkerId(model=name, slot=slot, version=version) for slot in range(len(configs))]
    return [(id.worker, place_text(each)) for id, each in zip(ids, configs, strict=True)]


def _threads_text(configs: Sequence[WorkerConfig]) -> str:
    most = max(config.placement.num_threads * config.placement.num_ranks for config in configs)
    return f"{len(configs)} x {most}"
