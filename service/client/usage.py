"""Names and exit statuses of the client's commands. Imports nothing of ours."""

COMMAND = "inferpool" if __name__.startswith("inferpool.") else "inferpool-client"
"""The name of the command: the verbs of the client are also verbs of `inferpool`."""
FAILED = 1
"""Exit status if something was refused or failed."""
USAGE_ERROR = 2
"""Exit status for a wrong command line or wrong settings."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells (128 + SIGINT)."""


class FlagError(ValueError):
    """The flags make no sense; the message says why."""
