"""Names what is imported only where a model needs it.

So the code that each call runs through imports none of it, and one sees here all that can be
attached.
"""

from importlib import import_module
from typing import Any

PLACES = {
    "ranked worker": "inferpool.workers.ranks.host_side:RankedWorker",
    "weights": "inferpool.models.files.checkpoint:load_weights",
}
"""Module and attribute by name."""


def attached(name: str) -> Any:
    """Import what a name stands for, when it is first used."""
    module, _, attribute = PLACES[name].partition(":")
    return getattr(import_module(module), attribute)
