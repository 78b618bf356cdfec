"""A model cut in two whose `load` changes settings of its thread; other threads must share them."""

import decimal
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec


class SettingModel(Model):
    """Answers which of its methods found other settings than `load` made; '' if none did."""

    outputs = (TensorSpec(name="x", dtype="float32", shape=(-1,)),)
    split_points = ("1",)

    def load(self, placement: Placement) -> None:
        self._strange: list[str] = []
        self.network = self.load_network(
            lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), None, placement, example=[torch.zeros(1)]
        )
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_flush_denormal(True)
        decimal.getcontext().prec = 5
        self._settings = settings()

    def preprocess(self, item: Item) -> Features:
        self._look("preprocess")
        return {"x": torch.tensor(1.0, dtype=torch.float32, device="cpu")}

    def forward(self, batch: Features) -> Features:
        self._look("forward")
        assert self.network is not None
        x_B = self.network(batch["x"])
        assert isinstance(x_B, Tensor)
        self._look("forward, after its network")
        return {"x": x_B}

    def postprocess(self, outputs: Features) -> Features:
        self._look("postprocess")
        return outputs

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        self._look("render")
        return ", ".join(self._strange)

    def _look(self, where: str) -> None:
        if settings() != self._settings:
            self._strange.append(f"{where}: {settings()}")


def settings() -> list[object]:
    """Return the settings that `load` changes, as this thread has them."""
    tiny = torch.tensor([1e-310], dtype=torch.float64, device="cpu")
    return [
        str(torch.empty(1).device),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        float(tiny + tiny),
        decimal.getcontext().prec,
        torch.get_num_threads(),
    ]
