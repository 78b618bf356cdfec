"""Who may ask for what: the API keys of each kind of call, and the policy of each path.

Runs in the event loop, before a body is read. A path without a policy here is not served at all,
so that no route is open by oversight.
"""

import logging
from collections.abc import Mapping
from typing import Literal

from inferpool.service.api.errors import ForbiddenError, NotFoundError, UnauthorizedError
from inferpool.service.settings.keys import Keys, digest_of, fingerprint_of, is_same

logger = logging.getLogger(__name__)

Access = Literal["predict", "metrics", "admin"]
"""What a key is for."""
Policy = Literal["open", "predict", "metrics", "admin"]
"""Who may ask for a path: anyone, or a key that is for it."""

POLICIES: Mapping[str, Policy] = {
    "/": "open",
    "/page": "open",
    "/docs": "open",
    "/openapi.json": "open",
    "/health/live": "open",
    "/health/ready": "open",
    "/health": "metrics",
    "/metrics": "metrics",
    "/events": "metrics",
    "/predict": "predict",
    "/admin": "admin",
}
"""Of a path and of all below it; the longest that fits counts. "/" is itself alone."""

_SETTINGS: Mapping[Access, str] = {
    "predict": "predict_keys",
    "metrics": "metrics_keys",
    "admin": "admin_keys",
}
KEY_MEANINGS: Mapping[Access, str] = {
    "predict": "the setting `predict_keys`.",
    "metrics": "the setting `metrics_keys`, or where there are none, of `predict_keys`.",
    "admin": "the setting `admin_keys`.",
}
"""Which keys open what, for people."""
_BEARER = b"bearer"
_BLANKS = b" \t"
"""What may stand around a header's value (RFC 9110, 5.6.3)."""

Headers = Mapping[bytes, bytes]
"""Names in lower case."""


class Guard:
    """Checks the key of each call.

    Metrics and health details are for the metrics keys; where there are none, for whoever may
    predict. Admin paths are not there at all without an admin key.
    """

    def __init__(
        self, *, predict: Keys | None = None, metrics: Keys | None = None, admin: Keys | None = None
    ) -> None:
        """Take the keys of each kind; none means that there is no restriction, or no admin."""
        given: Mapping[Access, Keys] = {
            "predict": predict or Keys(),
            "metrics": metrics or predict or Keys(),
            "admin": admin or Keys(),
        }
        self._restricted = {access for access, keys in given.items() if keys}
        self._accesses: dict[bytes, tuple[bytes, set[Access]]] = {}
        for access, keys in given.items():
            for digest in keys.digests:
                self._accesses.setdefault(digest, (digest, set()))[1].add(access)

    @property
    def restricted(self) -> frozenset[Access]:
        """What needs a key."""
        return frozenset(self._restricted)

    @property
    def restricts_predict(self) -> bool:
        """Calls to `/predict` need a key."""
        return "predict" in self._restricted

    def check_path(self, path: str, headers: Headers) -> None:
        """See whether a call may ask for a path.

        Raises:
            NotFoundError: There is nothing there for anyone.
            UnauthorizedError: It needs a key, and has none that is known.
            ForbiddenError: Its key is for something else.
        """
        policy = policy_of(path)
        if policy is None or (policy == "admin" and "admin" not in self._restricted):
            raise NotFoundError(f"there is nothing at {path[:200]}; /docs lists what there is")
        if policy != "open":
            self.check(policy, headers)

    def check(self, access: Access, headers: Headers) -> None:
        """See whether a call has a key for something.

        Raises:
            UnauthorizedError: It needs a key, and has none that is known.
            ForbiddenError: Its key is for something else.
        """
        if access not in self._restricted:
            return
        key = key_of(headers)
        if key is None:
            raise UnauthorizedError(
                "this needs a key: `Authorization: Bearer KEY`, or `X-API-Key: KEY`"
            )
        digest = digest_of(key)
        known = self._accesses.get(digest)
        if known is None or not is_same(known[0], digest):
            raise UnauthorizedError("this key is not known here")
        if access not in known[1]:
            raise ForbiddenError(
                f"this key is for something else; this needs one of {_SETTINGS[access]}"
            )

    def allows(self, access: Access, headers: Headers) -> bool:
        """Whether a call has a key for something, or needs none."""
        try:
            self.check(access, headers)
        except (UnauthorizedError, ForbiddenError):
            return False
        return True


def policy_of(path: str) -> Policy | None:
    """Who may ask for a path; None where nobody has decided, which means that nobody may."""
    while path:
        if path in POLICIES:
            return POLICIES[path]
        path = path.rpartition("/")[0]
    return None


def key_of(headers: Headers) -> bytes | None:
    """The key that a call brings, or None."""
    authorization = headers.get(b"authorization", b"")
    scheme, rest = authorization[: len(_BEARER)], authorization[len(_BEARER) :]
    if scheme.lower() == _BEARER and rest.startswith((b" ", b"\t")):
        return rest.strip(_BLANKS)
    key = headers.get(b"x-api-key")
    return None if key is None else key.strip(_BLANKS)


def caller_of(headers: Headers) -> str:
    """The fingerprint of a call's key, for the audit log."""
    key = key_of(headers)
    return "none" if key is None else fingerprint_of(digest_of(key))
