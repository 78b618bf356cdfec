"""The calls that this service answers otherwise than TorchServe on purpose, with the reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meant:
    """Calls of one address that are answered otherwise for one reason."""

    reason: str
    calls: Sequence[str]
    server: str = "inference"
    status: int | None
    """Ours for all of them; None: the connection ends."""


MEANT: Sequence[Meant] = (
    Meant(
        reason="a bad form is the client's mistake, and no part of it is handed over",
        calls=(
            "a picture as application/x-www-form-urlencoded",
            "a form's part without a name",
            "a form cut short",
            "fields %zz=1",
        ),
        status=400,
    ),
    Meant(
        reason="a packed body would reach the handler as it is",
        calls=("a packed body",),
        status=415,
    ),
    Meant(
        reason="the answer says what the limit is",
        calls=("too large a body", "too large a form"),
        status=413,
    ),
    Meant(
        reason="the log has the cause, and a worker that is out of memory gets fewer instances",
        calls=(
            *("answers object", "answers memory", "answers cuda", "answers short"),
            *("answers no list", "answers nothing"),
        ),
        status=503,
    ),
    Meant(
        reason="the body of an answer to HEAD would be lost, and the prediction with it",
        calls=("HEAD of a prediction",),
        status=405,
    ),
    Meant(
        reason="the description is that of this service, at /docs and /openapi.json",
        calls=("OPTIONS of a prediction", "OPTIONS of the root"),
        status=405,
    ),
    Meant(
        reason="errors of paths that TorchServe has not are those of this service",
        calls=(
            *("POST /predictions", "POST /predictions/", "POST /ping/predict", "POST /other"),
            *("POST /plain/predict/2.0", "GET /other", "GET /ping/more", "twice a slash"),
            "POST /a/b/c/d",
            "the description",
        ),
        status=404,
    ),
    Meant(
        reason="this service has none, and says what to do",
        calls=("an explanation", "an explanation of nobody", "a workflow"),
        status=404,
    ),
    Meant(
        reason="it is a path of KServe's v1 protocol, which wants instances in JSON",
        calls=("POST /v1/models/plain:predict",),
        status=400,
    ),
    Meant(
        reason="it is a path of this service",
        calls=("the root", "GET /metrics", "KServe's v1 readiness"),
        status=200,
    ),
    Meant(
        reason="models are for who has an admin key, on every address",
        calls=("GET /models", "GET /models/plain", "POST /models", "POST /models/plain/other"),
        status=401,
    ),
    Meant(
        server="management",
        reason="the description is that of this service, at /docs and /openapi.json",
        calls=("OPTIONS /models/plain", "OPTIONS /models/absent", "OPTIONS /"),
        status=405,
    ),
    Meant(
        server="management",
        reason="the description is that of this service, at /docs and /openapi.json",
        calls=("GET /api-description",),
        status=404,
    ),
    Meant(
        server="management",
        reason="a bad request is the client's mistake, and a model keeps a worker",
        calls=(
            *("PUT /models/boxes?min_worker=-1", "register by bad JSON"),
            "PUT /models/later?min_worker=0&synchronous=true",
        ),
        status=400,
    ),
    Meant(
        server="management",
        reason="an archive is named as it is called in model_store, and by nothing else",
        calls=(
            *("POST /models?url=", "POST /models?url=../outside.mar"),
            *("POST /models?url=/etc/passwd", "POST /models?url=%2e%2e%2foutside.mar"),
            *("POST /models?url=http://127.0.0.1:9/x.mar", "POST /models?url=file:///etc/passwd"),
            "POST /models?url=broken.mar",
        ),
        status=400,
    ),
)
"""docs/moving-from-torchserve.md has the same differences."""


def meant_statuses() -> Mapping[tuple[str, str], int | None]:
    """Return our statuses by the names of the address and the call."""
    return {(each.server, call): each.status for each in MEANT for call in each.calls}
