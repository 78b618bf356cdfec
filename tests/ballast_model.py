"""A model that takes known memory."""

import torch

from inferpool.models.spec import Placement
from tests.marked_model import MarkedModel

BALLAST_BYTES = 150 << 20


class BallastModel(MarkedModel):
    """A `MarkedModel` that takes `BALLAST_BYTES` of memory which it shares with no process."""

    def load(self, placement: Placement) -> None:
        """Take the memory, page by page."""
        super().load(placement)
        self._ballast = torch.ones(BALLAST_BYTES, dtype=torch.uint8)
