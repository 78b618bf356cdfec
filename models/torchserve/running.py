"""Runs the handlers of archives as models. Worker processes only.

A handler gets each batch in one call, as from TorchServe. If it raises, the worker computes the
batch in halves, so that the other requests are answered.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inferpool.models.base import Model
from inferpool.models.errors import BadReturnError, InputError, ModelError
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.spec import ArchiveFacts, Placement
from inferpool.models.texts import text_of
from inferpool.models.torchserve.answers import HandlerAnswer, HandlerAnswers, HandlerStatusError
from inferpool.models.torchserve.archive import Archived
from inferpool.models.torchserve.context import HandlerContext
from inferpool.models.torchserve.envelopes import Handle, enveloped
from inferpool.models.torchserve.handlers.util import PredictionException
from inferpool.models.torchserve.loading import loaded_handler
from inferpool.models.torchserve.requests import HandlerRequest

logger = logging.getLogger(__name__)

REQUESTS = "requests"
"""Name of the feature that has the requests themselves: no tensors are made of them."""
_ANSWER = "_answer"


class ArchiveModel(Model):
    """A model that a handler of TorchServe computes.

    An instance is the bytes of a request, or a JSON value. `models.torchserve.requests` has the
    parameters that protocols give; without them the handler gets one part, `body`.
    """

    # A handler may return anything, and nothing is known that one could try it on.
    finite_outputs = False

    def __init__(self, facts: Archived, folder: Path, *, envelope: str | None = None) -> None:
        """Store an archive's facts, and the folder that its files lie in."""
        self._facts = facts
        self._folder = folder
        self._envelope = envelope
        self.archive = ArchiveFacts(
            name=facts.name, version=facts.version, handler=facts.model.handler
        )

    def load(self, placement: Placement) -> None:
        """Import the handler and initialise it.

        Raises:
            ModelError: There is no such handler, or its import fails.
            Exception: Its own code raises.
        """
        if placement.num_ranks > 1:
            raise ModelError(f"{self._facts.path}: an archive cannot be split over devices")
        kind, _, number = placement.devices[0].partition(":")
        self._context = HandlerContext(
            self._facts.name,
            str(self._folder),
            self._facts.manifest,
            self._facts.numbers.get("batchSize", 1),
            int(number or 0) if kind != "cpu" else None,
            max_image_pixels=self.max_image_pixels,
            model_yaml_config=self._facts.config(),
        )
        handle = loaded_handler(self._folder, self._facts.model.handler, self._context)
        self._handle: Handle = enveloped(self._envelope, handle) if self._envelope else handle

    def preprocess(self, item: Item) -> Features:
        """Check an instance, and read it if it is JSON."""
        return {REQUESTS: HandlerRequest(item)}  # type: ignore[dict-item]  # `collate` reads it

    def collate(self, instances: Sequence[Features]) -> Features:
        """Put requests together: a handler gets them all."""
        requests: Any = [each[REQUESTS] for each in instances]
        return {REQUESTS: requests}

    def forward(self, batch: Features) -> Outputs:
        """Call the handler with a batch."""
        requests: Any = batch[REQUESTS]
        answers: Any = self.answers(requests)
        return {_ANSWER: HandlerAnswers(answers)}

    def render_batch(
        self, outputs: Outputs, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Turn answers into what each call asked for."""
        return [
            shown(answer, wanted)
            for answer, wanted in zip(outputs[_ANSWER], parameters, strict=True)
        ]

    def answers(
        self, requests: Sequence[HandlerRequest], *, more: bool | None = None
    ) -> list[HandlerAnswer]:
        """Call the handler with some requests, and return an answer for each.

        Args:
            requests: The requests.
            more: What the answers say about further parts.

        Raises:
            BadReturnError: It returned something else than an answer for each.
            Exception: Its own code raises.
        """
        context = self._context
        context.begin(requests)
        data = [request.data() for request in requests]
        try:
            with torch.inference_mode(mode=False):  # as in TorchServe: a handler may need gradients
                returned = self._handle(data, context)
        except (PredictionException, InputError) as error:
            if len(requests) > 1:  # TorchServe would fail them all
                raise
            if isinstance(error, InputError) and not requests[0].is_enveloped:
                raise
            answer = _refusal_of(error, context, more)
            if not requests[0].is_enveloped:
                answer.check_status()
            return [answer]
        name = context.model_name
        if not isinstance(returned, list):
            kind = type(returned).__name__
            raise BadReturnError(f"{name}: the handler returned {kind}, not a list")
        if len(returned) != len(requests):
            raise BadReturnError(
                f"{name}: the handler returned {len(returned)} answers to {len(requests)} requests"
            )
        found = [context.answer(place, value, more=more) for place, value in enumerate(returned)]
        for request, answer in zip(requests, found, strict=True):
            if answer.status >= 500 and not request.is_enveloped:
                answer.check_status()
        return found


def shown(answer: HandlerAnswer, parameters: Mapping[str, object]) -> object:
    """Return an answer as its call asked for it: content, a JSON value, or an `InputError`."""
    if parameters.get("envelope"):
        return answer.content()
    try:
        return answer.plain()
    except InputError as error:
        return error


def _refusal_of(
    error: PredictionException | InputError, context: HandlerContext, more: bool | None
) -> HandlerAnswer:
    """Return the answer for an error that is a handler's word on a request (`ts/service.py`).

    TorchServe says the same for a picture that cannot be read as for a handler that is broken.
    """
    if isinstance(error, InputError):
        logger.info("the handler refuses a request: %s", text_of(error))
        code, message = 503, "Prediction failed"
    else:
        code, message = error.error_code, str(error.message)
    if not isinstance(code, int) or not 400 <= code <= 599:
        raise HandlerStatusError(f"PredictionException has the status {code!r}") from error
    context.set_response_status(507 if code == 413 else code)  # as in `RestJob.java`
    return replace(context.answer(0, None, more=more), error=message)
