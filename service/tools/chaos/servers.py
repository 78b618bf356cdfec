"""Calls as other servers of models have them, for `inferpool chaos --protocol`.

They are TorchServe's, SageMaker's and Vertex AI's. Bodies are those of `/predict`.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from inferpool.service.client.reaching import problem_in

VERTEX_ROUTE = "/v1/endpoints/1:predict"
_MEANINGS = {
    "Prediction failed": (500, "model_error"),
    r"\d+ (workers died|hosts were lost) while they": (500, "worker_crashed"),
    r"\d+ workers have died while they computed this": (422, "quarantined"),
}
"""Statuses and codes of `/predict` by how messages begin: these servers' errors have no codes."""


class ServerForm(NamedTuple):
    """How a server is asked for a model; `{}` stands for its name."""

    path: str
    headers: Mapping[str, str] = {}

    def headers_for(self, model: str) -> dict[str, str]:
        """Return the headers of a call."""
        return {name: value.format(model) for name, value in self.headers.items()}

    def predictions(self, body: bytes, *, is_json: bool) -> bytes:
        """Return the body of a success as `/predict` has it: an archive answers without envelope.

        Raises:
            ValueError: It says that it is JSON, and is none.
        """
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError:
            if is_json:
                raise
            value = body.decode(errors="backslashreplace")
        has_envelope = isinstance(value, dict) and "predictions" in value
        return msgspec.json.encode(value if has_envelope else {"predictions": [value]})

    def problem(self, status: int, body: bytes) -> tuple[int, str, str]:
        """Return the status, code and message of an error as `/predict` has them."""
        found = problem_in(body)
        message = str(found.get("message") or found.get("error") or body[:200])
        code = found.get("code")
        if isinstance(code, str):
            return status, code, message
        for begin, known in _MEANINGS.items():
            if re.match(begin, message):
                return *known, message
        return status, "", message


SERVER_FORMS: Mapping[str, ServerForm] = {
    "torchserve": ServerForm("/predictions/{}"),
    "sagemaker": ServerForm("/invocations", {"X-Amzn-SageMaker-Target-Model": "{}"}),
    "vertex": ServerForm(VERTEX_ROUTE),
}
"""Forms by the name of their protocol. Vertex AI asks the default model alone."""
