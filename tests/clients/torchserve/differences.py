"""The calls that this service answers otherwise than TorchServe on purpose, with the reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meant:
    """Calls of one address that are answered otherwise for one reason."""

    reason: str
    calls: Sequence[str]
    server: str = "inference"
    status: int | None
    """Ours for all of them; None: the connection ends."""


MEANT: Sequence[Meant] = ()


def meant_statuses() -> Mapping[tuple[str, str], int | None]:
    """Return our statuses by the names of the address and the call."""
    return {(each.server, call): each.status for each in MEANT for call in each.calls}
