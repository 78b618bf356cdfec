"""Calls a service's /admin/models, and explains failures in plain words.

Errors::

    OperatorError               the service refuses, or cannot be reached
    ├── UnreachedError          it does not answer now; a later try may succeed
    ├── UnknownNameError        it has no model of that name
    └── WrongRequestError       it cannot use the settings or the options
"""

import difflib
import ssl
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from ..connecting import STRAIGHT, open_client
from ..reaching import is_hopeless, problem_in, why_unreached
from ..urls import without_password
from ..usage import COMMAND
from .flags import ADMIN_KEY_VARIABLE

_TIMEOUT_S = 30.0
_CONNECT_S = 5.0
_Seen = TypeVar("_Seen", bound=msgspec.Struct)


class OperatorError(Exception):
    """The service refuses, or cannot be reached."""

    def __init__(self, text: str, problem: Mapping[str, object] | None = None) -> None:
        super().__init__(text)
        self.problem = problem
        """Its answer, if it is a problem document."""


class UnreachedError(OperatorError):
    """The service does not answer now."""


class UnknownNameError(OperatorError):
    """The service has no model of that name."""


class WrongRequestError(OperatorError):
    """The service cannot use the settings or the options."""

    code = "invalid_input"


class FiguresSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of a version with the former one."""

    num_inputs: int = 0
    num_live: int = 0
    agreement: float | None = None
    deviation: float | None = None
    latency_ratio: float | None = None
    memory_ratio: float | None = None
    num_faults: int = 0
    num_validated: int = 0
    accuracy: float | None = None
    accuracy_before: float | None = None
    num_answered: int = 0
    fault_share: float | None = None
    fault_share_before: float | None = None
    live_latency_ratio: float | None = None


class KnownVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model."""

    number: int
    state: str
    source: str
    weights: str
    since: float
    reason: str = ""
    figures: FiguresSeen | None = None


class ChangeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a model."""

    id: str
    kind: str
    state: str
    version: int | None = None
    code: str = ""
    reason: str = ""


class ModelSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    name: str
    version: int | None
    ready: bool
    change: str = ""
    saved: bool = True
    versions: Sequence[KnownVersion] = ()
    changes: Sequence[ChangeSeen] = ()

    def numbered(self, number: int | None) -> KnownVersion | None:
        """Return a version by its number."""
        return next((each for each in self.versions if each.number == number), None)


class ModelsSeen(msgspec.Struct, frozen=True, kw_only=True):
    """All models of a service."""

    models: Sequence[ModelSeen]


class AdminConnection:
    """Connection of an operator to one service."""

    def __init__(
        self,
        url: str,
        key: str,
        context: ssl.SSLContext,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.place = without_password(url)
        self._url = url
        self._has_key = bool(key)
        self._http = open_client(
            STRAIGHT,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=context,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
            transport=transport,
        )

    def ask(
        self, method: str, name: str = "", rest: str = "", body: Mapping[str, object] | None = None
    ) -> bytes:
        """Ask about all models, or about one by its name; return the body of the answer.

        The service answers at once; a change goes on afterwards.

        Raises:
            UnreachedError: The service does not answer now.
            UnknownNameError: It has no such model.
            WrongRequestError: It cannot use the settings or the options.
            OperatorError: It refuses.
        """
        path = f"/{quote(name, safe='')}{rest}" if name else ""
        try:
            answer = self._http.request(
                method,
                f"{self._url}/admin/models{path}",
                content=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json", "Prefer": "respond-async"},
            )
        except httpx.TransportError as error:
            text = why_unreached(error, self._url, command=f"{COMMAND} models list")
            kind = OperatorError if is_hopeless(error) else UnreachedError
            raise kind(text) from error
        if answer.status_code >= 300:
            raise self._refusal(answer)
        return answer.content

    def read(self, body: bytes, kind: type[_Seen]) -> _Seen:
        """Read the body of an answer.

        Raises:
            OperatorError: It is no answer of an inferpool.
        """
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise OperatorError(f"this version cannot read what {self.place} says") from error

    def nearest(self, name: str) -> str:
        """Return a question that names the most similar model; empty if none is similar."""
        try:
            every = self.read(self.ask("GET"), ModelsSeen).models
        except OperatorError:
            return ""
        near = difflib.get_close_matches(name, [each.name for each in every], n=1)
        return f"did you mean {near[0]}?" if near else ""

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _refusal(self, answer: httpx.Response) -> OperatorError:
        problem = problem_in(answer.content)
        if "code" not in problem:
            return OperatorError(
                f"the server at {self.place} is no inferpool: it answers {answer.status_code}"
            )
        detail = str(problem.get("detail", ""))
        match problem["code"]:
            case "unauthorized" | "forbidden":
                cure = "another key" if self._has_key else "a key for administration"
                text = (
                    f"{self.place} wants {cure}: --key-file PATH, or the variable "
                    f"{ADMIN_KEY_VARIABLE} ({detail})"
                )
                return OperatorError(text, problem)
            case "not_found" | "method_not_allowed":
                text = (
                    f"{self.place} cannot be administered: it was started without keys for that. "
                    f"Start it with {ADMIN_KEY_VARIABLE} or --admin-keys-file"
                )
                return OperatorError(text, problem)
            case "unknown_model":
                return UnknownNameError(detail, problem)
            case WrongRequestError.code | "bad_request":
                return WrongRequestError(detail, problem)
            case "unavailable":
                return UnreachedError(f"{self.place} cannot answer now: {detail}", problem)
        return OperatorError(detail, problem)
