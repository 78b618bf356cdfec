"""A split model whose stages keep a simulated device busy, and do what the width of an input says.

The host never looks at a number: so it is ahead of the devices as far as the product lets it be.
"""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

BUSY_S = 0.1
"""Time that a busy stage takes on the device, for each call of it."""
MODEL = 3
"""Number of a stage that is none: the model's own code acts, on the host."""
_ACTS = ("ok", "busy", "lose", "kill", "hang", "wait", "free")
_MOST_RANKS = 4


class BusyStage(nn.Module):
    """A step that adds one. torch.fx cannot trace it, since it branches on a shape.

    A device that is to "wait" does so until one that is to "free" it has come to that.
    """

    def __init__(self, stage: int, folder: str = "") -> None:
        super().__init__()
        self._stage = stage
        self._freed = Path(folder) / "freed"

    def forward(self, rows: Tensor) -> Tensor:
        act, stage = divmod(rows.shape[1] - 1, _MOST_RANKS)
        if rows.device.type == "sim" and (stage == self._stage or _ACTS[act] == "busy"):
            self._act(_ACTS[act])
        return rows + 1

    def _act(self, act: str) -> None:
        match act:
            case "busy":
                torch.sim.busy(BUSY_S * 1e6)  # type: ignore[attr-defined]  # of test builds
            case "lose":
                torch.sim.lose()  # type: ignore[attr-defined]
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                torch.sim.hang()  # type: ignore[attr-defined]  # as above
            case "wait":
                torch.sim.call(partial(_wait_for, self._freed))  # type: ignore[attr-defined]  # as above
            case "free":
                torch.sim.call(self._freed.touch)  # type: ignore[attr-defined]  # as above


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


def busy_pair() -> nn.Module:
    """Build two stages."""
    return nn.Sequential(BusyStage(0), BusyStage(1))


def rows_for(act: str, numbers: Tensor, stage: int = 0) -> Tensor:
    """Make inputs that have a stage act."""
    return numbers[:, None].expand(-1, _width_of(act, stage))


def _width_of(act: str, stage: int) -> int:
    return 1 + _ACTS.index(act) * _MOST_RANKS + stage


class BusyStages(Model):
    """Takes {"n": number, "do": act, "stage": which}; answers twice n. All stages are busy."""

    outputs = (TensorSpec(name="twice", dtype="int64", shape=(-1,)),)

    def __init__(self, *, folder: str = "") -> None:
        self._folder = folder

    def load(self, placement: Placement) -> None:
        stages = range(placement.num_ranks)
        self.device = torch.device(placement.devices[0])
        self.split_points = [str(stage) for stage in stages[1:]]
        self.network = self.load_network(
            lambda: nn.Sequential(*(BusyStage(stage, self._folder) for stage in stages)),
            None,
            placement,
            example=[torch.zeros(1, 1)],
        )
        self._num_ranks = len(stages)

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        assert isinstance(value, dict)
        number = torch.tensor([float(value["n"])])
        return {"x": rows_for(value.get("do", "ok"), number, value.get("stage", 0))[0]}

    def forward(self, batch: Features) -> Features:
        assert self.network is not None
        if batch["x"].shape[1] == _width_of("free", MODEL):
            (Path(self._folder) / "freed").touch()
        x_BA = self.network(batch["x"].to(self.device, non_blocking=True))
        assert isinstance(x_BA, Tensor)
        return {"twice": (x_BA[:, 0] - self._num_ranks).long() * 2}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return {"twice": int(outputs["twice"])}
