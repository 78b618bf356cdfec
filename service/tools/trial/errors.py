"""Why nothing could be tried."""


class TrialError(Exception):
    """There is nothing to try: no service, or no input for it.

    The message says why, and what to do about it.
    """
