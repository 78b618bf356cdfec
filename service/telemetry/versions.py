"""Versions of installed packages. It imports nothing of them, so it works with the client alone."""

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str = "inferpool") -> str:
    """Return the version of an installed package, or "unknown"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
