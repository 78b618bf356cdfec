"""The versions of what is installed. It needs nothing of that, as where only the client is."""

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str = "inferpool") -> str:
    """The version of an installed package; "unknown" where it is not installed as one."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
