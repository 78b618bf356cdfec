"""Bounds the batches of a model of texts by their tokens, as `max_batch_tokens` says.

The front end has no tokenizer. So it counts what a text should cost by its bytes, and bounds what
a worker is sent together. The worker knows the tokens, and cuts exactly: see `Model.num_tokens`.

A long text makes its batch longer by the time that it takes itself, and the answers of a batch
leave together. So no short text waits longer for the long ones beside it than these would take
alone, and for no more of them than the bound allows.
"""

from collections.abc import Sequence

from inferpool.models.spec import TextFacts
from inferpool.models.speed_names import MOST_GROWN
from inferpool.service.catalog.catalog import ModelVersion
from inferpool.service.queue.instance import Instance
from inferpool.service.queue.scheduling.scheduler import QueuePolicy

_BYTES_PER_TOKEN = 4
"""OpenAI's rule of thumb for English (help.openai.com, "What are tokens and how to count them?").
A token id in JSON takes 5 or 6. Languages with other letters have more tokens per byte: for them
the worker cuts more."""
_OWN_TOKENS = 2
"""Tokens that each text has besides: for its start and its end."""


class TokenBound(QueuePolicy):
    """Allows a batch as many of those that wait as should have no more tokens than the bound.

    Args:
        max_batch_tokens: The bound. A text that has more goes alone.
        version: The version; its interface says how long a text may be once a worker is ready.
    """

    def __init__(self, max_batch_tokens: int, version: ModelVersion) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._version = version

    def bound(self, waiting: Sequence[Instance]) -> int:
        """Return how many of the first may share a batch, at least one; all if they are no texts.

        A pure function of the sizes of the payloads, which does not read them.
        """
        facts = self._version.interface.text
        if facts is None:
            return len(waiting)
        left = self._max_batch_tokens
        for number, instance in enumerate(waiting):
            left -= cost_of(instance.ref.num_bytes, facts)
            if left < 0:
                return max(1, number)
        return len(waiting)


def cost_of(num_bytes: int, facts: TextFacts) -> int:
    """Estimate the tokens of a payload; the model reads no more than its `max_tokens`."""
    return min(num_bytes // _BYTES_PER_TOKEN + _OWN_TOKENS, facts.max_tokens)


def add_token_bound(version: ModelVersion) -> None:
    """Bound the batches of a version, if its settings say so."""
    settings, scheduler = version.settings, version.pool.dispatcher.scheduler
    if settings.max_batch_tokens:
        scheduler.policies.append(TokenBound(settings.max_batch_tokens, version))
        if settings.max_batch_size == "auto":  # many short texts cost as much as a few long ones
            scheduler.limit.hold(MOST_GROWN)
