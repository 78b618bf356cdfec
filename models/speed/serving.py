"""Lends a model another network than its own. Worker processes only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inferpool.models.base import Model


@contextmanager
def serving(model: Model, network: Callable[..., object] | None) -> Iterator[None]:
    """Have the model compute with that network meanwhile."""
    before, model.network = model.network, network
    try:
        yield
    finally:
        model.network = before
