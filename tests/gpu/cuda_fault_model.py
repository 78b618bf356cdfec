"""A model that fills a CUDA device, or breaks its context, as the input says."""

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec


class CudaFaultModel(Model):
    """Takes {"n": number, "share": of the device's memory, "assert": bool}; answers {"twice"}."""

    outputs = (TensorSpec(name="twice", dtype="int64", shape=(-1,)),)

    def load(self, placement: Placement) -> None:
        self._device = torch.device(placement.devices[0])
        self._num_bytes = torch.cuda.get_device_properties(self._device).total_memory

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        assert isinstance(value, dict)
        return {
            "n": torch.tensor(value["n"]),
            "share": torch.tensor(float(value["share"])),
            "assert": torch.tensor(bool(value.get("assert"))),
        }

    def forward(self, batch: Features) -> Features:
        num_bytes = int(batch["share"].sum() * self._num_bytes)
        taken = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        n = batch["n"].to(self._device)
        if batch["assert"].any():
            table = torch.zeros(4, device=self._device)
            table[torch.full((1,), 9, device=self._device)].sum()
            torch.cuda.synchronize()
        del taken
        return {"twice": n * 2}

    def render(self, outputs: Features, parameters: object) -> object:
        return {"twice": int(outputs["twice"])}

    def warmup(self) -> list[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": 0, "share": 0.001}'))]
