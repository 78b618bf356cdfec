"""The model whose behaviour is chosen by its input, as a replica of several ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from inferpool.models.item import Features, Item
from inferpool.models.runtime import LoadIsOver
from inferpool.models.spec import Placement, RankPart, SplitReport
from inferpool.models.split.ranks import Ranks
from tests.fault_model import ACTS, FaultModel


class SplitFaultModel(FaultModel):
    """A `FaultModel` whose input says which rank acts: {"rank": number}, by default the lead."""

    def load(self, placement: Placement) -> None:
        ranks = cast("Ranks | None", self.ranks)
        assert ranks is not None
        super().load(placement)
        self.network = network = FaultNetwork(ranks, self._act)
        self._runtime = replace(self._runtime, split_network=network)
        if ranks.rank:
            raise LoadIsOver

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        rank = value.get("rank", 0) if isinstance(value, dict) else 0
        return {"rank": torch.tensor(rank), **super().preprocess(item)}

    def forward(self, batch: Features) -> Features:
        assert self.network is not None
        theirs_B = batch["rank"] > 0
        x_BA = batch["x"].clone()
        self.network(torch.where(theirs_B, x_BA[:, 1], 0), batch["rank"])
        x_BA[theirs_B, 1] = ACTS.index("ok")
        return super().forward({"x": x_BA})


class FaultNetwork:
    """Each rank acts as the lead says, and answers the lead."""

    def __init__(self, ranks: Ranks, act: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._act = act
        self.part = RankPart(ranks.rank, 4 * ranks.rank, f"part {ranks.rank}")
        self.report = SplitReport(("here",), "as told")

    def __call__(self, *args: object) -> object:
        acts, ranks = args
        assert isinstance(acts, Tensor)
        assert isinstance(ranks, Tensor)
        for rank in range(1, self._ranks.size):
            self._ranks.send(rank, "do", [acts[ranks == rank]])
        for rank in range(1, self._ranks.size):
            message, (count,) = self._ranks.receive(rank)
            assert message == "done"
            assert int(count) == int((ranks == rank).sum())
        return None

    def serve_next(self, timeout_s: float) -> None:
        _, (acts,) = self._ranks.receive(0, timeout_s)
        for act in acts.tolist():
            self._act(ACTS[act])
        self._ranks.send(0, "done", [torch.tensor(len(acts))])
