"""Errors about how somebody uses the command `inferpool`.

    FlagError       the flags of a verb make no sense
    SettingsError   the settings cannot be used

Every verb imports this, so it imports nothing of ours.
"""

from collections.abc import Sequence


class FlagError(ValueError):
    """The flags make no sense; the message says why."""


class SettingsError(Exception):
    """The settings cannot be used.

    Attributes:
        problems: One line each: the place, the value, and what would be right.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
