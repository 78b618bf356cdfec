"""What is wrong with how somebody uses the command `inferpool`: its flags, or its settings.

    FlagError       the flags of a verb make no sense
    SettingsError   the settings cannot be used

Imported for every verb, so it imports nothing of ours.
"""

from collections.abc import Sequence


class FlagError(ValueError):
    """The flags make no sense; the message says why."""


class SettingsError(Exception):
    """The settings cannot be used.

    Attributes:
        problems: One line each: the place, what is there, and what would be right.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        """Keep the problems apart, so that each can have its line."""
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
