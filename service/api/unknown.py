"""Says which models there are to a call for another one. Runs in the event loop."""

from inferpool.service.api.exchange import DEFAULT_MODEL, PREFIX, VERSIONS, Call, Predict
from inferpool.service.errors import UnknownModelError


def unknown_model(predict: Predict, call: Call) -> UnknownModelError:
    """Return the error for a call to a model or version that is not served."""
    names, path = ", ".join(predict.names) or "none", predict.name_in(call)
    if not path:
        return UnknownModelError(f"no model is the default; name one in the path: {names}")
    if path.startswith("/"):
        return UnknownModelError(f"no model has the path {path[:80]!r} now; there are: {names}")
    name, asks_for_version, version = path.partition(VERSIONS)
    if name == predict.default and name not in predict.models and _is_unnamed(call):
        return UnknownModelError(
            f"the default model {name!r} is not served now; name one in the path: {names}"
        )
    if VERSIONS in version:
        return UnknownModelError(
            "the call asks for one version of the model, and X-Model-Version for another one"
        )
    if asks_for_version and name in predict.models:
        prefix = name + VERSIONS
        there = [each for each in predict.models if each.startswith(prefix)]
        numbers = ", ".join(each.removeprefix(prefix) for each in there)
        error = UnknownModelError(
            f"{name} has no version {version[:20]!r} loaded; there are: {numbers}"
        )
        error.is_version = True
        return error
    return UnknownModelError(f"no model is called {name[:80]!r}; there are: {names}")


def _is_unnamed(call: Call) -> bool:
    """Return whether a call leaves the choice of the model to the service."""
    if call.protocol is not None:
        return call.protocol.name_in(call) == DEFAULT_MODEL
    return len(call.path) <= len(PREFIX) + 1
