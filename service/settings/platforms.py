"""Finds settings in the variables that platforms give a container.

Sources: Cloud Run's "Container runtime contract" and Knative's (PORT, K_SERVICE), Heroku's "Dynos"
(PORT, DYNO), Vertex AI's "Custom container requirements" (AIP_...), and SageMaker's "Use Your Own
Inference Code with Hosting Services" and its toolkit sagemaker-inference, `parameters.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inferpool.models.attached import attached
from inferpool.service.settings.names import PREFIX, SettingsError

Found = tuple[Mapping[str, object], str] | tuple[Mapping[str, object], str, Sequence[str]]
"""A table of settings as in a file, its origin ("file PATH" or "environment VAR"), and warnings."""

IMAGE_VARIABLE, IMAGE = "CONTAINER_IMAGE", "inferpool"
"""The variable that our image sets, and its value."""
_CLOSED = {"host": "0.0.0.0", "only_predictions": True, "show_errors": False}
"""Settings for a platform that alone decides who reaches the container."""
_CLOUD_RUN_DRAIN_S = 7.0
"""Cloud Run kills 10 s after SIGTERM."""
_ACCEPT, _JSON = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "application/json"
_SAGEMAKER_PORT, _SAGEMAKER_FOLDER = "8080", "/opt/ml"
_SAGEMAKER_MIB = 25
"""The largest body of a call to an endpoint (AWS, "Amazon SageMaker AI endpoints and quotas")."""
_MAX_MIB = 2**16
"""The largest `max_body_bytes`."""
_SAGEMAKER_INSTANCES = 10_000
"""Rows in one body: a batch transform sends up to 6 MB of them by default."""
_SAGEMAKER_TIMEOUT_S = 60.0
"""The longest that an endpoint waits for an answer (AWS, "Use Your Own Inference Code with Hosting
Services")."""


def settings_of_platform(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, object], cwd: Path
) -> Iterator[Found]:
    """Yield the settings that variables of a platform give.

    Raises:
        SettingsError: A variable names a model that cannot be served.
    """
    if is_image(environ):
        # Published ports decide who reaches the container.
        yield {"host": "0.0.0.0", "port": 8000}, f"environment {IMAGE_VARIABLE}"
    if port := environ.get("PORT"):
        yield {"port": _number(port)}, "environment PORT"
    if environ.get("DYNO"):
        yield _CLOSED, "environment DYNO"
    if environ.get("K_SERVICE"):
        drain = {"drain_timeout_s": _CLOUD_RUN_DRAIN_S}
        yield _CLOSED | _without(drain, file), "environment K_SERVICE"
    own = ("models", "watch", "torchserve")
    has_models = "model" in flags or any(
        name in flags or file.get(name) or environ.get(f"{PREFIX}{name.upper()}") for name in own
    )
    has_models = has_models or any(name.startswith(f"{PREFIX}MODELS__") for name in environ)
    yield from _of_sagemaker(flags, environ, file, has_models=has_models)
    yield from _of_vertex(environ, has_models=has_models)


def is_image(environ: Mapping[str, str]) -> bool:
    """Return whether this runs in our image."""
    return environ.get(IMAGE_VARIABLE) == IMAGE


def warnings_of_platform(origins: Mapping[str, str]) -> Sequence[str]:
    """Return what to log of settings that a platform has decided, by the origins of settings."""
    origin = origins.get("only_predictions", "")
    kind, _, name = origin.partition(" ")
    if kind not in ("environment", "argument") or name.startswith(PREFIX):
        return ()
    address = "listens on every interface and " if origins.get("host") == origin else ""
    return (
        f"{name}: a platform decides who reaches this service, so it {address}serves predictions "
        "and probes alone: no page, /docs, /events, /metrics, /health and /admin, nor texts of "
        f"exceptions; {PREFIX}ONLY_PREDICTIONS=false opens them",
    )


def _of_sagemaker(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    file: Mapping[str, object],
    *,
    has_models: bool,
) -> Iterator[Found]:
    base = Path(environ.get("SAGEMAKER_BASE_DIR") or _SAGEMAKER_FOLDER)
    is_multi = environ.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"
    folder = base / ("models" if is_multi else "model")
    port = environ.get("SAGEMAKER_BIND_TO_PORT")
    origin = "environment SAGEMAKER_BIND_TO_PORT"
    is_given = is_multi or folder.is_dir()  # the folder of several comes with the first of them
    if not port and is_given and is_image(environ) and "model" not in flags:
        # SageMaker runs `docker run IMAGE serve`.
        port, origin = _SAGEMAKER_PORT, "argument serve"
    if port:
        yield _CLOSED | {"port": _number(port), "sagemaker": True}, origin
    elif not (
        "sagemaker" in flags
        or environ.get(f"{PREFIX}SAGEMAKER", "").lower() in ("true", "1", "yes", "on")
        or file.get("sagemaker") is True
    ):
        return
    else:
        origin = "setting sagemaker"
    most, place = environ.get("SAGEMAKER_MAX_PAYLOAD_IN_MB"), origin
    if most:
        place = "environment SAGEMAKER_MAX_PAYLOAD_IN_MB"
    mib = _number(most or str(_SAGEMAKER_MIB))
    if not isinstance(mib, int) or not 0 < mib <= _MAX_MIB:
        raise SettingsError([f"{place.split()[1]}: {most!r} is no number from 1 to {_MAX_MIB}"])
    num_bytes = mib * 2**20
    limits: dict[str, object] = {
        "max_body_bytes": num_bytes,
        "max_json_bytes": num_bytes,
        "max_instances_per_request": _SAGEMAKER_INSTANCES,
        "default_timeout_s": _SAGEMAKER_TIMEOUT_S,
    }
    yield _without(limits, file), place
    if (accept := environ.get(_ACCEPT, _JSON)) != _JSON:
        text = f"{_ACCEPT}: {accept!r} is not used: calls without Accept are answered in {_JSON}"
        yield {}, f"environment {_ACCEPT}", (text,)
    if is_multi:
        yield {"sagemaker_models": str(folder)}, "environment SAGEMAKER_MULTI_MODEL"
    elif not has_models and folder.is_dir():
        found = attached("model of a folder")(folder, origin.partition(" ")[2])
        yield found, f"folder {folder}"


def _of_vertex(environ: Mapping[str, str], *, has_models: bool) -> Iterator[Found]:
    if port := environ.get("AIP_HTTP_PORT"):
        yield _CLOSED | {"port": _number(port)}, "environment AIP_HTTP_PORT"
        endpoint, model = environ.get("AIP_ENDPOINT_ID"), environ.get("AIP_DEPLOYED_MODEL_ID")
        if endpoint and model:  # its own default, if the model was uploaded without routes
            path = f"/v1/endpoints/{endpoint}/deployedModels/{model}"
            routes = {"vertex_health_route": path, "vertex_predict_route": f"{path}:predict"}
            yield routes, "environment AIP_DEPLOYED_MODEL_ID"
    for name in ("health", "predict"):
        variable = f"AIP_{name.upper()}_ROUTE"
        if route := environ.get(variable):
            yield {f"vertex_{name}_route": f"/{route.strip('/')}"}, f"environment {variable}"
    place = environ.get("AIP_STORAGE_URI")
    if place and not has_models:
        found = attached("model of a URI")(place, "AIP_STORAGE_URI")
        yield found, "environment AIP_STORAGE_URI"


def _number(text: str) -> int | str:
    """Return a number, or else the text, which the check of the settings then shows."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _without(settings: Mapping[str, object], file: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that the file does not have: it was written for this service."""
    return {name: value for name, value in settings.items() if name not in file}
