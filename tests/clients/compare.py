"""Compares an answer of ours with Triton's to the same call.

`DOCUMENTED` has what is meant to differ, with the reason; docs/open-inference.md says the same.
Triton counts batches of each size from its start (`batch_stats`), and this service from the first
call for statistics; it does not count responses.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from tests.clients.shapes import MODELS

_REFUSED = ("400", "INVALID_ARGUMENT", "UNIMPLEMENTED")
DOCUMENTED: dict[str, tuple[Collection[str], str]] = {
    "a stream's model.*": (("200", "OK"), "all parts come as one list"),
    "GET /v2/": (("200",), "the specification has both"),
    "GET /v2/models": (("200",), "as KServe has it"),
    "GET /v2/models/nobody/(ready|stats)|statistics of no model": (
        ("404", "NOT_FOUND"),
        "the model is unknown",
    ),
    "NaN": (("400",), "it is no JSON"),
    "too large a batch": (("200",), "a call may have more rows than a batch"),
    "a size that is huge": (("400",), "Triton 2.51 ends"),
    "a header length of x": (("400",), "Triton reads the body as raw"),
    "gzip cut": (("400",), "Triton does not check the end"),
    "an unknown encoding": (("415",), "the client's mistake"),
    "triton_enable_empty_final_response: True": (("200",), "reserved names are ignored"),
    ".*shared memory.*|(system|cuda): .*": (_REFUSED, "a region would open a file of the host"),
    "(update )?(trace|log) settings|(GET|POST) .*(trace/setting|logging)": (
        _REFUSED,
        "settings are the operator's",
    ),
    "infer after load|FP16": (("200",), "a model that is loaded again is a new version"),
    "stream: parts and the final response": (("200",), "the empty answer has a version"),
    "(un)?load of no model by the key": (("404", "NOT_FOUND"), "the model is unknown"),
    "load with a (configuration|file) by the key": (("400",), "models come from the operator"),
    "metadata of a version that is no number": (("NOT_FOUND",), "as over HTTP"),
    "live|ready": (("200",), "Triton has no JSON in its answer, and kserve needs it"),
    "(un)?load( of no model|: bad JSON)?": (
        ("401", "403", "UNAUTHENTICATED", "PERMISSION_DENIED"),
        "the admin key is needed",
    ),
}
"""Calls that are answered by another status on purpose: patterns of their names in the scripts, our
statuses, and the reason."""
_MODEL_KEYS = ("name", "versions", "inputs", "outputs")
_CONFIG_KEYS = ("name", "max_batch_size", "input", "output")
_FIELD_KEYS = ("name", "data_type", "dims")
_UNEQUAL = ("has_length", "has length", "batch_stats", "response_stats", "ns")
"""Keys that may be missing, such as times of zero over gRPC."""
_UNLOADED = "UNAVAILABLE"
_ERRORS = ("error", "error_message")
_HEALTH = re.compile(r"GET /v2/(health/\w+|models/\w+(/versions/\d+)?/ready)|live|ready")
_BAD_INPUT = ("500", "INTERNAL")
_OURS_FOR_BAD_INPUT = ("400", "INVALID_ARGUMENT")


def difference(call: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return how two answers differ where they must not; "" if they are the same.

    Args:
        call: The name of the call.
        theirs: Triton's answer: "status" and, if that is a success, anything else.
        ours: The answer to compare with it.
    """
    status, our_status = str(theirs["status"]), str(ours["status"])
    if our_status != status:
        if status in _BAD_INPUT and our_status in _OURS_FOR_BAD_INPUT:
            return ""  # a bad request is the client's mistake
        return f"status {our_status}, not {status}"
    if status not in ("200", "OK"):
        return ""
    return _first_difference("answer", essence(call, theirs), essence(call, ours))


def reason_of(call: str, ours: Mapping[str, Any]) -> str:
    """Return why an answer of ours may differ from Triton's; "" if it may not."""
    for pattern, (statuses, reason) in DOCUMENTED.items():
        if re.fullmatch(pattern, call) and str(ours["status"]) in statuses:
            return reason
    return ""


def essence(call: str, value: Any) -> Any:
    """Return the parts of an answer that must be equal on every server."""
    if _HEALTH.fullmatch(call):
        return None
    if isinstance(value, Mapping):
        if "extensions" in value:
            return sorted(value)
        if "model_stats" in value:
            return _keys(value["model_stats"][0])
        if "config" in value and isinstance(value["config"], Mapping):
            return essence(call, value["config"])
        if "state" in value:
            return {"name": value["name"], "state": value["state"].replace("UNLOADING", _UNLOADED)}
        if "max_batch_size" in value:
            found = {key: value.get(key) for key in _CONFIG_KEYS}
            for key in ("input", "output"):
                found[key] = [{name: each.get(name) for name in _FIELD_KEYS} for each in found[key]]
            return found
        if "versions" in value:
            return {key: value.get(key) for key in _MODEL_KEYS}
        return {
            key: bool(each) if key in _ERRORS else essence(call, each)
            for key, each in value.items()
            if key not in _UNEQUAL
        }
    if isinstance(value, list):
        return [essence(call, each) for each in value if not _is_ours_alone(each)]
    return value


def _is_ours_alone(value: Any) -> bool:
    """Return whether a value is about a model that Triton does not serve."""
    return isinstance(value, Mapping) and "state" in value and value["name"] not in MODELS


def _keys(value: Any) -> Any:
    """Return the keys of nested objects, without their values."""
    if isinstance(value, Mapping):
        return {key: _keys(each) for key, each in value.items() if key not in _UNEQUAL}
    return [_keys(each) for each in value[:1]] if isinstance(value, list) else None


def _first_difference(place: str, theirs: Any, ours: Any) -> str:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key not in ours:
                return f"{place}.{key} is missing"
            if key not in theirs:
                return f"{place}.{key} is new: {ours[key]!r}"
            if found := _first_difference(f"{place}.{key}", theirs[key], ours[key]):
                return found
        return ""
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        found = (_first_difference(f"{place}[{i}]", one, two) for i, (one, two) in pairs)
        return next((each for each in found if each), "")
    if isinstance(theirs, float) and isinstance(ours, float):
        is_same = math.isclose(theirs, ours, rel_tol=1e-7) or (theirs != theirs and ours != ours)
        return "" if is_same else f"{place}: {ours}, not {theirs}"
    if theirs == ours:
        return ""
    return f"{place}: {str(ours)[:80]!r}, not {str(theirs)[:80]!r}"
