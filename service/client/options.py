"""What callers of both clients may choose."""

import difflib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from inferpool.service.client.errors import InferpoolError
from inferpool.service.client.retries import Retry


class ClientOptions(TypedDict, total=False):
    """Of a client."""

    key: str | None
    """An API key, sent as `Authorization: Bearer`."""
    timeout_s: float | None
    """For each prediction, with all attempts and the pauses between them; 30 by default, None for
    as long as it takes. The service is told what is left of it, and answers in time or gives up;
    it does so after its `max_timeout_s` in any case, and after its `default_timeout_s` for None."""
    connect_timeout_s: float
    """For one attempt to connect; 5 by default."""
    retries: Retry | int
    """How to try again, or how often at most; 0 for never."""
    on_retry: Callable[[InferpoolError, float], None]
    """Told of what went wrong whenever a prediction is about to be tried again, and in how many
    seconds that is."""
    max_concurrency: int
    """Connections, and predictions of `predict_many`, at a time; 16 by default."""
    verify: bool | str | ssl.SSLContext
    """Of HTTPS: True checks certificates, a path names a file of those who may sign them."""
    headers: Mapping[str, str]
    """Sent along with each request."""
    proxy: str | None
    """The URL of a proxy; by default those of the environment count (`HTTP_PROXY`, ...), and "" is
    for none."""


class PredictOptions(TypedDict, total=False):
    """Of one prediction."""

    model: str | None
    """Its name in the service; None: the default model."""
    parameters: Mapping[str, object] | None
    """For the model."""
    priority: int | None
    """1 goes first, 9 last; 5 by default."""
    timeout_s: float | None
    """Instead of the client's."""
    request_id: str | None
    """To be found in the service's log; made if not given, the same for all attempts."""
    traceparent: str | None
    """Of the trace to go on with (W3C Trace Context)."""
    as_arrays: bool
    """Ask for `Prediction.arrays` and `tensors` instead of JSON."""


class ManyOptions(TypedDict, total=False):
    """Of many predictions. The first five are those of `PredictOptions`, for each input."""

    model: str | None
    parameters: Mapping[str, object] | None
    priority: int | None
    timeout_s: float | None
    as_arrays: bool
    max_concurrency: int
    """Instead of the client's, if less."""
    is_ordered: bool
    """Results come in the order of the inputs (default), or as they are there, each with its
    `index`."""
    on_progress: Callable[["Progress"], None] | None
    """Told after each result, before it is handed out."""


def check_names(options: Mapping[str, object], kind: type) -> None:
    """Refuse an option that there is not, such as `timeout`, as Python does with parameters.

    Raises:
        TypeError: There is none of that name.
    """
    for name in options:
        if name not in kind.__annotations__:
            near = difflib.get_close_matches(name, kind.__annotations__, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no option {name!r}{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far `predict_many` is."""

    num_done: int
    num_failed: int
    """Of these."""
    num_running: int
