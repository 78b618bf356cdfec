"""Calls of TorchServe's inference API: how they are read and answered. Runs in the event loop.

They stand at `/predictions/NAME[/VERSION]`, `/NAME[/VERSION]/predict`, `/models/NAME/invoke` and
`/invocations`, and ask an archive or any other model.
"""

from collections.abc import Mapping, Sequence

from inferpool.service.api.codecs.answers import Outcome
from inferpool.service.api.codecs.body import BodyContext, Decoded
from inferpool.service.api.codecs.requests import decode
from inferpool.service.api.errors import Answer
from inferpool.service.api.exchange import Call, CallProtocol, Exchange, ModelEntry, own_answer
from inferpool.service.errors import BadRequestError, ServiceError, UnavailableError
from inferpool.service.parts.torchserve.answers import (
    first_piece,
    handler_answer,
    next_piece,
)
from inferpool.service.parts.torchserve.errors import error_answer
from inferpool.service.parts.torchserve.paths import (
    asked_in,
    key_in,
    key_of,
    name_among,
    named_in,
)
from inferpool.service.parts.torchserve.requests import Field, read_call, read_form
from inferpool.service.queue.instance import Buffer

_NO_NAME = "Parameter model_name is required."
"""TorchServe's words."""


class HandlerProtocol(CallProtocol):
    """Calls to one of the paths. Has no state."""

    methods = ("POST", "PUT", "GET", "PATCH", "DELETE")
    """TorchServe has handlers compute whatever the method is."""

    def has_path(self, path: str) -> bool:
        """Return whether a path is TorchServe's: others of this service end in /predict too."""
        return asked_in(path) is not None

    def name_in(self, call: Call) -> str | None:
        """Return the name that the head of a call has; None if it has none."""
        return named_in(call)

    def key_in(self, call: Call, models: Mapping[str, ModelEntry]) -> str | None:
        """Return the key in `Predict.models` that a call asks for; None if its form may say it."""
        return key_in(call, models)

    def opened(self, exchange: Exchange, chunks: Sequence[Buffer]) -> "HandlerProtocol":
        """Return the protocol of a call to `/invocations`, from the form that names its model.

        Raises:
            ServiceError: It names none, or cannot be read.
        """
        form = read_form(exchange.call, chunks, exchange.predict.limits)
        name = name_among([(each.name.encode(), each.content) for each in form or ()])
        if name is None:
            raise BadRequestError(_NO_NAME)
        return _NamedProtocol(name, form)

    def decode(
        self, exchange: Exchange, entry: ModelEntry, chunks: Sequence[Buffer]
    ) -> Decoded | None:
        """Read a whole body: of any form for an archive, and as `/predict` does for others.

        Raises:
            ServiceError: It cannot be read, or the model is not known yet.
        """
        call, limits, interface = exchange.call, exchange.predict.limits, entry.interface
        if interface.media_types is None:
            raise UnavailableError(f"{entry.name} has not loaded yet", retry_after_s=1)
        asked = asked_in(call.path)
        assert asked is not None
        call.ref.wants_tensors = False
        if interface.archive is None:
            query = b"" if asked.name is None else call.query  # that names the model
            head = BodyContext(call.headers, query, entry.inputs, limits, interface)
            given = call.headers.get(b"content-type", b"")
            return decode(given, list(map(bytes, chunks)), head)
        if interface.streams:
            call.chosen = "pieces"
        return read_call(exchange, asked, self._form_of(exchange, chunks), chunks)

    def reply(self, call: Call, outcomes: Sequence[Outcome]) -> Answer:
        """Render what a handler returned, or the outcomes of a model that is no archive.

        Raises:
            ServiceError: It failed.
        """
        assert call.entry is not None
        if call.entry.interface.archive is not None:
            return handler_answer(outcomes[0])
        errors = [each for each in outcomes if isinstance(each, ServiceError)]
        if len(errors) == len(outcomes):
            raise errors[0]
        return own_answer(call, outcomes)

    def problem(self, error: ServiceError, call: Call) -> Answer:
        """Render an error."""
        return error_answer(error, call)

    def first_piece(self, part: bytes) -> Answer:
        """Return status, headers and first bytes of an answer in parts."""
        return first_piece(part)

    def next_piece(self, part: bytes) -> bytes:
        """Return the bytes of a later part."""
        return next_piece(part)

    def _form_of(self, exchange: Exchange, chunks: Sequence[Buffer]) -> list[Field] | None:
        return read_form(exchange.call, chunks, exchange.predict.limits)


class _NamedProtocol(HandlerProtocol):
    """A call whose form names its model."""

    def __init__(self, name: str, form: list[Field] | None) -> None:
        self._name = name
        self._form = form

    def name_in(self, call: Call) -> str | None:
        return self._name

    def key_in(self, call: Call, models: Mapping[str, ModelEntry]) -> str | None:
        return key_of(models, self._name)

    def problem(self, error: ServiceError, call: Call) -> Answer:
        return error_answer(error, call, self._name)

    def _form_of(self, exchange: Exchange, chunks: Sequence[Buffer]) -> list[Field] | None:
        form, self._form = self._form, None  # so that the call does not keep its body
        return form
