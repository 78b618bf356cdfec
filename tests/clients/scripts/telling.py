"""Shared by the scripts of clients: each call is one line of JSON, with its answer or its error."""

import json
import os
import sys

KEY = "operator-of-the-tests"
"""The admin key of the service; Triton has none."""


def named(call):
    """Return the header that names a call for the proxy that records it; empty if none does."""
    return {"x-call": call} if os.environ.get("CLIENTS_RECORD") else {}


def plain(value):
    """Return a value of a client as JSON can show it."""
    if hasattr(value, "as_numpy"):
        raise TypeError("tensors are shown by `tensors_of`")
    if hasattr(value, "DESCRIPTOR"):
        from google.protobuf.json_format import MessageToDict

        return MessageToDict(value, preserving_proto_field_name=True)
    return value


def array(values):
    """Return an array of numpy as JSON: dtype, shape, and the values as texts."""
    flat = [each.decode() if isinstance(each, bytes) else str(each) for each in values.ravel()]
    return {"dtype": str(values.dtype), "shape": list(values.shape), "values": flat}


def tell(call, answer=None, error=None):
    """Write the line of one call."""
    line = {"call": call, "answer": answer, "error": error}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def shown(error):
    """Return an error of any client as JSON: its class, status and text."""
    for name in ("status", "code"):
        found = getattr(error, name, None)
        if found is not None:
            status = found() if callable(found) else found
            break
    else:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
    return {"type": type(error).__name__, "status": str(status), "text": str(error)[:300]}
