"""A queue-based parallel inference server for PyTorch models: the names to import.

Write a model with these:
    Model, Features, Item, TensorSpec, Placement, InputError
Ask a running service with these:
    Client, AsyncClient, Prediction, Label, Timing, Retry, Health, ModelInfo, Progress, and the
    errors under InferpoolError

Each is imported when it is first named, so that a client needs neither torch nor the server.
"""

TYPE_CHECKING = False  # of `typing`, which costs more to import than the command's first line
if TYPE_CHECKING:
    from inferpool.models.base import Model
    from inferpool.models.errors import InputError
    from inferpool.models.item import Features, Item
    from inferpool.models.spec import Placement, TensorSpec
    from inferpool.service.client.async_client import AsyncClient
    from inferpool.service.client.errors import InferpoolError
    from inferpool.service.client.health import Health, ModelInfo
    from inferpool.service.client.options import Progress
    from inferpool.service.client.results import Label, Prediction, Timing
    from inferpool.service.client.retries import Retry
    from inferpool.service.client.sync_client import Client

_PLACES = {
    "models.base": ("Model",),
    "models.errors": ("InputError",),
    "models.item": ("Features", "Item"),
    "models.spec": ("Placement", "TensorSpec"),
    "service.client.async_client": ("AsyncClient",),
    "service.client.errors": ("InferpoolError",),
    "service.client.health": ("Health", "ModelInfo"),
    "service.client.options": ("Progress",),
    "service.client.results": ("Label", "Prediction", "Timing"),
    "service.client.retries": ("Retry",),
    "service.client.sync_client": ("Client",),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "AsyncClient",
    "Client",
    "Features",
    "Health",
    "InferpoolError",
    "InputError",
    "Item",
    "Label",
    "Model",
    "ModelInfo",
    "Placement",
    "Prediction",
    "Progress",
    "Retry",
    "TensorSpec",
    "Timing",
]


def __getattr__(name: str) -> object:
    """Import a public name from its place (PEP 562)."""
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f"{__name__}.{_PLACE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
