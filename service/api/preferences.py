"""Reads what a client prefers from the header `Prefer` (RFC 7240)."""

from collections.abc import Iterable
from typing import NamedTuple

_MOST_DIGITS = 9
_RESPOND_ASYNC = "respond-async"


class Preferences(NamedTuple):
    """The preferences that are known here; others are ignored, as the RFC says."""

    is_async: bool = False
    """The client wants no answer but the place where the result will be (4.1)."""
    wait_s: int | None = None
    """How long it is ready to wait for the result (4.3)."""

    @property
    def applied(self) -> str:
        """The value of `Preference-Applied` when all were followed."""
        given = [_RESPOND_ASYNC] if self.is_async else []
        return ", ".join(given if self.wait_s is None else [*given, f"wait={self.wait_s}"])

    def at_most(self, most_s: int) -> "Preferences":
        """Return the preferences with a wait of at most this time."""
        return self if self.wait_s is None else self._replace(wait_s=min(self.wait_s, most_s))


def read_preferences(header: str) -> Preferences:
    """Read the header's value; repeated ones are joined by commas. The first one of a name counts.

    What cannot be read is ignored, as the RFC says (2).
    """
    given: dict[str, str] = {}
    for each in header.lower().split(","):
        name, _, value = each.partition(";")[0].partition("=")
        given.setdefault(name.strip(), value.strip().strip('"'))
    wait = given.get("wait", "")
    is_number = wait.isascii() and wait.isdigit() and len(wait) <= _MOST_DIGITS
    return Preferences(_RESPOND_ASYNC in given, int(wait) if is_number else None)


def is_async(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the headers of a call, with names in lower case, ask for `respond-async`."""
    given = [value.decode("latin-1") for name, value in headers if name == b"prefer"]
    return bool(given) and read_preferences(",".join(given)).is_async
