"""Makes the parts for platforms."""

from functools import partial
from typing import TYPE_CHECKING

from inferpool.service.catalog.catalog import Catalog
from inferpool.service.service import Part
from inferpool.service.settings.settings import Settings

if TYPE_CHECKING:
    from fastapi import APIRouter

    from inferpool.service.parts.swap.changes import Changes

_ERRORS = "inferpool.service.parts.platforms.sagemaker:error_answer"
_READY, _ALIVE = "/health/ready", "/health/live"


def parts_of_platforms(
    settings: Settings, catalog: Catalog, changes: "Changes | None"
) -> list[Part]:
    """Make the parts that the settings ask for; `changes` load SageMaker's models."""
    parts = []
    if route := settings.vertex_health_route:
        parts.append(Part(name="Vertex AI", aliases={route: _READY}))
    if settings.sagemaker:
        parts.append(_sagemaker(settings, catalog, changes))
    return parts


def _sagemaker(settings: Settings, catalog: Catalog, changes: "Changes | None") -> Part:
    folder = settings.sagemaker_models
    if folder is None or changes is None:
        return Part(
            name="SageMaker",
            aliases={"/ping": _READY},
            forms_of_errors=dict.fromkeys(("invocations", "models"), _ERRORS),
        )

    def routers(folder: str, changes: "Changes") -> "list[APIRouter]":
        from inferpool.service.parts.platforms.models import models_router

        return [models_router(folder, catalog, changes)]

    return Part(
        name="SageMaker's models",
        # It is to stay alive while no model is loaded, so that some can be.
        aliases={"/ping": _ALIVE},
        later={"models": partial(routers, folder, changes)},
        forms_of_errors=dict.fromkeys(("invocations", "models"), _ERRORS),
    )
