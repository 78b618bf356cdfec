"""Options that callers of both clients may pass."""

import difflib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from .errors import InferpoolError
from .retries import Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a `predict_many` call."""

    num_done: int
    """Inputs that have a result, failed ones included."""
    num_failed: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPeriods:
    """How long a client waits for a service that computes its jobs, and for their inputs."""

    max_pause_s: float = 2.0
    """Longest pause before a service that is away is asked again."""
    lost_s: float = 600.0
    """Without a timeout: how long a service may be away while its job is waited for."""
    piece_s: float = 0.5
    """A piece of a body is sent after so long, however short it is, so that slow inputs show that
    they come."""


class ClientOptions(TypedDict, total=False):
    """Options of a client."""

    key: str | None
    """API key, sent as `Authorization: Bearer`."""
    timeout_s: float | None
    """Time for each prediction, all attempts and pauses included; 30 by default, None for no limit.
    The client tells the service how much is left, so that the service answers or gives up in time.
    The service's own limits hold as well: `max_timeout_s`, and `default_timeout_s` for None."""
    connect_timeout_s: float
    """Time for one attempt to connect; 5 by default."""
    retries: Retry | int
    """Retry policy, or the largest number of retries; 0 for none."""
    on_retry: Callable[[InferpoolError, float], None]
    """Called before each retry, with the error and the pause in seconds."""
    max_concurrency: int
    """Most connections at a time, and most running predictions of `predict_many`; 16 by default."""
    verify: bool | str | ssl.SSLContext
    """TLS check: True uses the system's certificates, a path names a file of trusted ones."""
    headers: Mapping[str, str]
    """Extra headers for each request."""
    proxy: str | None
    """URL of a proxy; "" uses none. None uses the environment (`HTTP_PROXY`, `HTTPS_PROXY` and
    `ALL_PROXY`), but not for this host, nor for what `NO_PROXY` names."""


class _SharedOptions(TypedDict, total=False):
    model: str | None
    """Name of the model in the service; None: the default model."""
    version: int | None
    """Version of the model; None: the one that serves. A version that is not loaded is unknown."""
    parameters: Mapping[str, object] | None
    """Parameters for the model."""
    priority: int | None
    """Priority from 1 (first) to 9 (last); 5 by default."""
    timeout_s: float | None
    """Timeout that replaces the client's."""
    as_arrays: bool
    """Ask for `Prediction.arrays` and `tensors` instead of JSON."""
    envelope: bool
    """False for a model that says `envelope = False`: what is sent as JSON is the whole body, and
    `Prediction.value` the whole answer."""
    accept: str | None
    """Media types of an answer to accept, such as "image/png", as in the header `Accept`; None: as
    the model answers. What is not JSON is `Prediction.content`."""


class PredictOptions(_SharedOptions, total=False):
    """Options of one prediction."""

    request_id: str | None
    """Name of the request in the service's log, the same for all attempts; made if not given."""
    traceparent: str | None
    """Trace to continue (W3C Trace Context)."""


class SubmitOptions(TypedDict, total=False):
    """Options of a new job."""

    model: str | None
    """Name of the model in the service; None: the default model. The version that serves computes
    the job."""
    parameters: Mapping[str, object] | None
    """Parameters for the model, the same for all inputs."""
    envelope: bool
    """False for a model that says `envelope = False`, if the input is a single one."""
    priority: int | None
    """Priority among jobs, from 1 (first) to 9 (last); 5 by default."""
    webhook: str | None
    """URL that the service tells when the job is over."""
    id: str | None
    """ID of the job: up to 64 of `A-Z a-z 0-9 . _ -`. The service makes one if it is not given."""
    idempotency_key: str | None
    """Name of this submission: the same key, inputs and options make one job only. The client makes
    one for its own retries if it is not given."""
    timeout_s: float | None
    """Time to send all inputs, retries included; None, the default, for no limit."""
    request_id: str | None
    """Name of the request in the service's log; made if not given."""
    traceparent: str | None
    """Trace to continue (W3C Trace Context)."""


class ManyOptions(_SharedOptions, total=False):
    """Options of `predict_many`; the first seven apply to each input."""

    max_concurrency: int
    """Limit that replaces the client's, if it is lower."""
    is_ordered: bool
    """True (default): results come in the order of the inputs. False: as soon as each is there;
    see its `index`."""
    on_progress: Callable[[Progress], None] | None
    """Called after each result, before it is yielded."""


def check_names(options: Mapping[str, object], kind: type) -> None:
    """Refuse an unknown option, such as `timeout`, as Python refuses an unknown parameter.

    Raises:
        TypeError: No option has this name.
    """
    for name in options:
        if name not in kind.__annotations__:
            near = difflib.get_close_matches(name, kind.__annotations__, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no option {name!r}{hint}")
