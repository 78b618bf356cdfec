"""Changes that clients may ask for twice, by `Idempotency-Key`.

The header is that of an Internet-Draft (draft-ietf-httpapi-idempotency-key-header). A client that
has lost its connection asks again with the same key, and learns how the change went that it began.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferpool.service.errors import BadRequestError, InvalidInputError

if TYPE_CHECKING:
    from asyncio import Future

_MAX_KNOWN = 256
_MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChange:
    """A change that was asked for."""

    name: str
    """The model."""
    digest: bytes
    """Tells whether a repeat asks for the same."""
    decision: "Future[None]"
    """Is done when the change is decided, with the error of one that failed."""


class AskedChanges:
    """Remembers the latest changes since the start of the service. In the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, AskedChange] = OrderedDict()

    def begin(
        self,
        key: str | None,
        asked: bytes,
        begin: Callable[[], str],
        until_decided: "Callable[[str], Future[None]]",
    ) -> AskedChange:
        """Begin a change, unless the key names one: then return that one.

        Args:
            key: The `Idempotency-Key`, if there is one.
            asked: Everything that tells one change from another: path and body.
            begin: Begins the change, and returns the name of the model.
            until_decided: Returns a future that is done once the change is decided.

        Raises:
            BadRequestError: The key is too long.
            InvalidInputError: The key names a change of another kind.
            ServiceError: An error of `begin`.
        """
        digest = hashlib.sha256(asked).digest()
        if key is not None and not 0 < len(key) <= _MAX_KEY_CHARS:
            raise BadRequestError(f"Idempotency-Key: must have 1 to {_MAX_KEY_CHARS} characters")
        earlier = None if key is None else self._known.get(key)
        if earlier is not None:
            if earlier.digest != digest:
                raise InvalidInputError(
                    "Idempotency-Key: another change was asked for with this key; take a new one"
                )
            return earlier
        name = begin()
        decision = until_decided(name)
        decision.add_done_callback(_retrieve)
        change = AskedChange(name=name, digest=digest, decision=decision)
        if key is not None:
            self._known[key] = change
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return change


def _retrieve(decision: "Future[None]") -> None:
    """Retrieve an error that nobody may wait for, else asyncio logs it."""
    if not decision.cancelled():
        decision.exception()
