"""A model whose answers tell the option that its version was made with."""

import os
from collections.abc import Mapping

from inferpool.models.item import Features
from tests.fault_model import FaultModel


class MarkedModel(FaultModel):
    """A `FaultModel` that answers {"n": n, "mark": the option, "pid": ...}."""

    def __init__(self, *, mark: int = 0, **options: object) -> None:
        """Take the mark, and the options of `FaultModel`."""
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._mark = mark

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return {"n": int(outputs["twice"]) // 2, "mark": self._mark, "pid": os.getpid()}
