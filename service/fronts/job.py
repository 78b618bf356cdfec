"""What a front is told when it starts."""

from dataclasses import dataclass

from service.api.connections import EdgeLimits
from service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a front needs to know; pickled into its process."""

    name: str
    """For the log: "front 0"."""
    main_pid: int
    settings: Settings
    limits: EdgeLimits
    part: range
    """Where in the arena it puts payloads."""
    held: dict[int, int]
    """Slots there that workers still read on behalf of an earlier life, and their lengths."""
    relay_path: str
    """The socket on which the main process answers what is no prediction."""
    family: int
    """Of the connections' addresses."""
    log_level: int
