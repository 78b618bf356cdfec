"""Cuts the groups of a batch by the tokens that the model counts. Runs in a worker process.

The front end bounds what it sends together by an estimate, so a batch may have more tokens than
`max_batch_tokens`, or several buckets. Each forward pass of the worker has no more, unless one
instance alone has.
"""

import logging
from collections.abc import Hashable, Sequence

from inferpool.models.base import Model
from inferpool.models.item import Features

logger = logging.getLogger(__name__)


class TokenCut:
    """Divides the instances of each bucket, in their order, into groups of bounded sums.

    Args:
        model: It counts the tokens.
    """

    def __init__(self, model: Model) -> None:
        most = model._runtime.max_batch_tokens
        assert most is not None, "nobody cuts without a bound"
        self._model = model
        self._most = most
        self._has_warned = False

    def rename(
        self,
        buckets: list[Hashable],
        features: Sequence[Features | None],
        indices: Sequence[int],
    ) -> None:
        """Give the instances of a bucket that are not computed together different buckets.

        Args:
            buckets: Bucket of each instance of a batch; changed in place.
            features: Features of each.
            indices: Instances that are computed.
        """
        sums: dict[Hashable, tuple[int, int]] = {}
        for i in indices:
            bucket, tokens = buckets[i], self._tokens_of(features[i])
            number, num_tokens = sums.get(bucket, (0, 0))
            if num_tokens and num_tokens + tokens > self._most:
                number, num_tokens = number + 1, 0
            sums[bucket] = number, num_tokens + tokens
            buckets[i] = bucket, number

    def _tokens_of(self, features: Features | None) -> int:
        try:
            return 0 if features is None else int(self._model.num_tokens(features))
        except Exception:  # a model's own method may raise anything: then nothing is cut
            if not self._has_warned:
                logger.warning("num_tokens has raised: batches are not cut", exc_info=True)
            self._has_warned = True
            return 0
