"""A split model whose stages do what an input says; it fails if two threads run its code."""

import os
import signal
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

_ACTS = ("ok", "sleep", "raise", "kill", "hang")
STAGE_S = 0.1


class ActingStage(nn.Module):
    """One step, since it branches on its input: rows of a number, an act and who acts."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage

    def forward(self, rows: Tensor) -> Tensor:
        for _, act, stage, *_ in rows.tolist():
            if stage in (self._stage, -1):
                self._act(_ACTS[int(act)])
        return rows + 0

    def _act(self, act: str) -> None:
        match act:
            case "sleep":
                time.sleep(STAGE_S)
            case "raise":
                raise ValueError("I was told to")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)


class ActingStages(Model):
    """Takes {"n": number, "do": act, "stage": which}, where -1 is all stages; answers twice n.

    With "calls" it calls its network so often, one call after the other.
    """

    outputs = (TensorSpec(name="twice", dtype="int64", shape=(-1,)),)

    def load(self, placement: Placement) -> None:
        stages = range(placement.num_ranks)
        self.split_points = [str(stage) for stage in stages[1:]]
        self.network = self.load_network(
            lambda: nn.Sequential(*map(ActingStage, stages)),
            None,
            placement,
            example=[torch.zeros(1, 4)],
        )
        self._num_inside = 0

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        assert isinstance(value, dict)
        act = _ACTS.index(value.get("do", "ok"))
        row = [value["n"], act, value.get("stage", 0), value.get("calls", 1)]
        return {"x": torch.tensor(row, dtype=torch.float32)}

    def forward(self, batch: Features) -> Features:
        self._work()
        assert self.network is not None
        for _ in range(int(batch["x"][:, 3].amax())):
            x_BA = self.network(batch["x"])
            self._work()
        assert isinstance(x_BA, Tensor)
        return {"twice": x_BA[:, 0].long() * 2}

    def postprocess(self, outputs: Features) -> Features:
        self._work()
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        self._work()
        return {"twice": int(outputs["twice"])}

    def _work(self) -> None:
        """Take a moment; fail if another thread runs this model's code meanwhile."""
        self._num_inside += 1
        time.sleep(0.002)
        if self._num_inside > 1:
            raise RuntimeError("another thread runs this model's code")
        self._num_inside -= 1
