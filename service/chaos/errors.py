"""Why nothing could be tested."""


class ChaosError(Exception):
    """There is nothing to test: no service, or no input with a known answer.

    The message says why, and what to do about it.
    """
