"""Stores what is shown of the versions and changes of models. Lives in the event loop."""

from collections.abc import Sequence
from dataclasses import replace

from inferpool.service.api.routes.health import HealthReport, ModelHealth
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.parts.swap.records import Change, ModelInfo, VersionHistory
from inferpool.service.report import worker_health


class ShownModels:
    """The models and their versions, as /health and /admin/models show them."""

    def __init__(self, catalog: Catalog) -> None:
        """Show what the catalog has, and no change."""
        self.history = VersionHistory()
        """The versions and changes, as far as they are remembered."""
        self.ongoing: dict[str, Change] = {}
        """The change of each model that is being changed."""
        self._catalog = catalog

    def list_models(self) -> Sequence[ModelInfo]:
        """Return all models."""
        names = dict.fromkeys((*self._catalog.serving, *self.ongoing))
        return [self.info(name) for name in names]

    def info(self, name: str) -> ModelInfo:
        """Return one model: also one that is on its way in or out, or that failed to come."""
        change, pool = self.ongoing.get(name), self._catalog.serving.get(name)
        self.remember_all(name)
        reasons = {each.number: each.pool.reason for each in self._catalog.versions(name)}
        return ModelInfo(
            name=name,
            version=pool.version if pool else None,
            ready=pool.is_ready if pool else False,
            change=change.what if change else "",
            saved=self._catalog.is_saved(name),
            versions=[
                record.info(reasons.get(record.number, ""))
                for record in self.history.versions(name)
            ],
            changes=[*([change.info()] if change else ()), *self.history.changes(name)],
        )

    def remember_all(self, name: str) -> None:
        """Record the versions that were there at the start."""
        serving = self._catalog.serving.get(name)
        for version in self._catalog.versions(name):
            self.history.record(version, "serving" if version.pool is serving else "loading")

    def add_to_health(self, report: HealthReport) -> HealthReport:
        """Return a report of /health with versions and changes, and models that come or go."""
        served = {model.name: model for model in report.models}
        return replace(
            report,
            models=[
                replace(
                    served.get(info.name) or self._absent(info),
                    change=info.change,
                    versions=info.versions,
                )
                for info in self.list_models()
            ],
        )

    def _absent(self, info: ModelInfo) -> ModelHealth:
        """Return what /health shows of a model without a version that serves."""
        pools = [version.pool for version in self._catalog.versions(info.name)]
        return ModelHealth(
            name=info.name,
            ready=False,
            reason=info.change or "no version of it serves",
            other_workers=[worker_health(slot) for pool in pools for slot in pool.slots],
        )
