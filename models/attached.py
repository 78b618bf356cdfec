"""Names what is imported only where a model needs it. Worker processes only.

So the code that each worker runs imports none of it, and one sees here all that can be attached.
"""

from importlib import import_module
from typing import Any

PLACES = {
    "weights": "inferpool.models.files.checkpoint:load_weights",
}
"""Module and attribute by name."""


def attached(name: str) -> Any:
    """Import what a name stands for, when it is first used."""
    module, _, attribute = PLACES[name].partition(":")
    return getattr(import_module(module), attribute)
