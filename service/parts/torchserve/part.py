"""Makes the part that serves as TorchServe does: paths, and addresses of its own."""

from typing import TYPE_CHECKING

from inferpool.service.api.auth import Guard
from inferpool.service.service import Part, Service

if TYPE_CHECKING:
    from inferpool.service.parts.swap.changes import Changes


def make_torchserve(service: Service, guard: Guard, changes: "Changes | None") -> Part:
    """Make the part; with `changes`, models can be registered.

    Raises:
        StartError: An address would be open to others without a key.
    """
    return Part(name="TorchServe")
