"""Checks API keys: which key a call needs is decided by its path.

Runs in the event loop, before a body is read. A path without a policy here is not served at all,
and a service that has such a route does not start, so no route is open by oversight.
"""

import logging
from collections.abc import Mapping
from typing import Literal

from inferpool.service.api.errors import ForbiddenError, NotFoundError, UnauthorizedError
from inferpool.service.queue.shares import owner_of_address
from inferpool.service.settings.keys import Keys, digest_of, fingerprint_of, is_same

logger = logging.getLogger(__name__)

Access = Literal["predict", "metrics", "admin"]
"""The kinds of keys."""
Policy = Literal["open", "predict", "metrics", "admin"]
"""The key that a path needs; none if it is open."""

MODELS = "/models"
POLICIES: Mapping[str, Policy] = {
    "/": "open",
    "/page": "open",
    "/docs": "open",
    "/docs/assets": "open",
    "/openapi.json": "open",
    "/health/live": "open",
    "/health/ready": "open",
    "/health": "metrics",
    "/metrics": "metrics",
    "/events": "metrics",
    "/predict": "predict",
    "/jobs": "predict",
    "/v1": "predict",
    "/v2": "predict",
    "/v2/health/live": "open",
    "/v2/health/ready": "open",
    "/v2/repository/models": "admin",
    "/admin": "admin",
    "/tei": "predict",
    "/info": "predict",
    "/embed": "predict",
    "/embed_all": "predict",
    "/embed_sparse": "predict",
    "/similarity": "predict",
    "/rerank": "predict",
    "/tokenize": "predict",
    "/decode": "predict",
    "/ping": "open",
    "/predictions": "predict",
    "/invocations": "predict",
    "/explanations": "predict",
    "/wfpredict": "predict",
    MODELS: "admin",
}
"""The policy of a path and of everything below it; the longest match counts. "/" means itself
alone. A route that is to be open stands here itself: none is so because of a path above it."""

KEY_MEANINGS: Mapping[Access, str] = {
    "predict": "the setting `predict_keys`.",
    "metrics": "the setting `metrics_keys`, or where there are none, of `predict_keys`.",
    "admin": "the setting `admin_keys`.",
}
"""The settings that hold the keys of each kind, for people."""
PROBES = frozenset(
    ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/ping")
)
"""The open paths that are left with the setting `only_predictions`."""
_BEARER = b"bearer"
_BLANKS = b" \t"
"""Characters that may stand around a header's value (RFC 9110, 5.6.3)."""

Headers = Mapping[bytes, bytes]
"""Header values by name in lower case."""


class Guard:
    """Checks the key of each call.

    Metrics and health details need a metrics key, or without metrics keys a predict key. Admin
    paths do not exist without an admin key.
    """

    def __init__(
        self,
        *,
        predict: Keys | None = None,
        metrics: Keys | None = None,
        admin: Keys | None = None,
        tells_apart: bool = False,
        share: float = 1.0,
        only_predictions: bool = False,
        loads_models: bool = False,
    ) -> None:
        """Store the keys of each kind. Without keys, calls are open and admin paths do not exist.

        With `only_predictions`, only calls that predict and probes exist. With `loads_models`, who
        may predict may ask for /models. If it tells predict keys apart, each has a number, which is
        the same in every process. One caller may have the part `share` of what others leave.
        """
        self.share = share
        self._only_predictions, self._loads_models = only_predictions, loads_models
        given: Mapping[Access, Keys] = {
            "predict": predict or Keys(),
            "metrics": metrics or predict or Keys(),
            "admin": admin or Keys(),
        }
        self._restricted = {access for access, keys in given.items() if keys}
        self._told_apart = {access for access, keys in given.items() if len(keys) > 1}
        self._accesses: dict[bytes, tuple[bytes, set[Access]]] = {}
        for access, keys in given.items():
            for digest in keys.digests:
                self._accesses.setdefault(digest, (digest, set()))[1].add(access)
        numbered = sorted(predict.digests) if predict and tells_apart else ()
        self._numbers = {digest: number for number, digest in enumerate(numbered, 1)}

    @property
    def restricted(self) -> frozenset[Access]:
        """The kinds of calls that need a key."""
        return frozenset(self._restricted)

    @property
    def restricts_predict(self) -> bool:
        """Calls to `/predict` need a key."""
        return "predict" in self._restricted

    def check_path(self, path: str, headers: Headers) -> None:
        """Check that a call may ask for a path.

        Raises:
            NotFoundError: Nothing is there for anyone.
            UnauthorizedError: It needs a key, and has no known one.
            ForbiddenError: Its key is for something else.
        """
        policy = policy_of(path)
        if self._loads_models and (path == MODELS or path.startswith(f"{MODELS}/")):
            policy = "predict"
        is_closed = self._only_predictions and policy != "predict" and path not in PROBES
        if policy is None or is_closed or (policy == "admin" and "admin" not in self._restricted):
            hint = "" if self._only_predictions else "; /docs lists what there is"
            raise NotFoundError(f"there is nothing at {path[:200]}{hint}")
        if policy != "open":
            self.check(policy, headers)

    def check(self, access: Access, headers: Headers) -> int:
        """Check that a call has a key of a kind, and return the key's number; 0 if it has none.

        Raises:
            UnauthorizedError: It needs a key, and has no known one.
            ForbiddenError: Its key is for something else.
        """
        if access not in self._restricted:
            return 0
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
            raise ForbiddenError(f"this key is for something else; this needs one of {access}_keys")
        return self._numbers.get(digest, 0)

    def owner_of(self, access: Access, headers: Headers, client: str | None) -> str:
        """Return the owner of the places that a call takes, once its key was checked.

        The owner is the key, or the client's address if no two keys are told apart.
        """
        key = key_of(headers) if access in self._told_apart else None
        return owner_of_address(client) if key is None else digest_of(key).hex()

    def allows(self, access: Access, headers: Headers) -> bool:
        """Return whether a call has a key of a kind, or needs none."""
        try:
            self.check(access, headers)
        except (UnauthorizedError, ForbiddenError):
            return False
        return True


def policy_of(path: str) -> Policy | None:
    """Return the policy of a path; None if it has none, so that nobody may ask for it."""
    while path:
        if path in POLICIES:
            return POLICIES[path]
        path = path.rpartition("/")[0]
    return None


def key_of(headers: Headers) -> bytes | None:
    """Return the key of a call, or None."""
    authorization = headers.get(b"authorization", b"")
    scheme, rest = authorization[: len(_BEARER)], authorization[len(_BEARER) :]
    if scheme.lower() == _BEARER and rest.startswith((b" ", b"\t")):
        return rest.strip(_BLANKS)
    key = headers.get(b"x-api-key")
    return None if key is None else key.strip(_BLANKS)


def caller_of(headers: Headers) -> str:
    """Return the fingerprint of a call's key, for the audit log."""
    key = key_of(headers)
    return "none" if key is None else fingerprint_of(digest_of(key))
