"""`POST /v1/models/{model}:predict`: how a call is read and answered. Runs in the event loop."""

from collections.abc import Sequence

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import Decoded
from inferpool.service.api.errors import Answer, problem
from inferpool.service.api.exchange import Call, Exchange, ModelEntry
from inferpool.service.errors import BadRequestError, ServiceError
from inferpool.service.queue.instance import Buffer

_START, _END = "/v1/models/", ":predict"


class PredictProtocolV1:
    """Calls of version 1 of the protocol. Has no state."""

    def name_in(self, call: Call) -> str:
        """Return the key in `Predict.models` that a call asks for."""
        return call.path.removeprefix(_START).removesuffix(_END)

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body.

        Raises:
            BadRequestError: Always.
        """
        raise BadRequestError("the body cannot be read")

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render the outcomes of all instances of a call."""
        return 200, [], b""

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return problem(error, call.request_id, call.path)
