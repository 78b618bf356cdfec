"""Calls as Vertex AI makes them of a container: how they are read and answered. In the event loop.

Source: Vertex AI's "Custom container requirements", whose JSON is that of KServe's version 1. With
`rawPredict` a body comes as its client sent it; what is no such JSON is read and answered as by
`/predict`.
"""

from collections.abc import Sequence

import msgspec

from inferpool.models.json_errors import BYTE_ORDER_MARK, JsonErrors
from inferpool.service.api.codecs.body import Decoded
from inferpool.service.api.exchange import DEFAULT_MODEL, Call, Exchange, ModelEntry
from inferpool.service.parts.kserve_v1.calls import PredictProtocolV1
from inferpool.service.queue.instance import Buffer

_JSON_TYPES = (b"application/json", b"application/x-www-form-urlencoded", b"")
"""Types of bodies that may be JSON; `curl -d` sends the second, other clients the last."""
_START_BYTES = 256


class _Instances(msgspec.Struct):
    instances: msgspec.Raw


_instances = msgspec.json.Decoder(_Instances)


class VertexProtocol(PredictProtocolV1):
    """Calls to the path in AIP_PREDICT_ROUTE, which are for the default model. Has no state."""

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for."""
        return DEFAULT_MODEL

    def decode(  # type: ignore[override]  # a raw body may be read elsewhere
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body.

        Raises:
            ServiceError: It cannot be read, or does not fit the model.
        """
        headers = exchange.call.headers
        bare = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_json = bare in _JSON_TYPES and b"x-tensor-shape" not in headers
        if is_json and not bare:
            start = bytes(chunks[0][:_START_BYTES]).removeprefix(BYTE_ORDER_MARK).lstrip()
            is_json = start[:1] in (b"{", b"")
        if is_json and (entry.interface.envelope or _has_instances(b"".join(chunks))):
            return super().decode(exchange, entry, chunks)
        return exchange.decode_as_own(entry, chunks)


def _has_instances(body: bytes) -> bool:
    try:
        _instances.decode(body.removeprefix(BYTE_ORDER_MARK))
    except JsonErrors:
        return False
    return True
