"""Model that computes on a device what its inputs say, and whose right answers are known."""

from collections.abc import Mapping, Sequence

import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

_WIDTH = 64


class AheadModel(Model):
    """Takes {"n": number, "do": act}; answers {"twice": 2 * number}.

    Acts: "raise" and "lose" the device in `forward`, "fault" on the device some time later, and
    "hang" there for ever; "hang early" in `preprocess`, "refuse" in `postprocess`, "nan".
    """

    can_run_ahead = True
    outputs = (TensorSpec(name="twice", dtype="float32", shape=(-1, _WIDTH)),)

    def __init__(self, *, busy_us: int = 0) -> None:
        self._busy_us = busy_us
        self.steps: list[tuple[str, int]] = []
        """Methods that were called, with the size of the batch."""

    def load(self, placement: Placement) -> None:
        self.device = torch.device(placement.devices[0])
        self.factor = torch.full((_WIDTH,), 2.0, device=self.device)

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        assert isinstance(value, dict)
        if value.get("do") == "hang early":
            torch.sim.hang()
            torch.sim.current_stream().synchronize()
        return {"x": torch.full((_WIDTH,), float(value["n"])), "do": value.get("do", "ok")}

    def collate(self, instances: Sequence[Features]) -> Features:
        acts = [each["do"] for each in instances]  # on the host, where nobody waits for them
        return {**super().collate([{"x": each["x"]} for each in instances]), "do": acts}  # type: ignore[dict-item]

    def forward(self, batch: Features) -> Features:
        acts = [*batch["do"]]
        self.steps.append(("forward", len(acts)))
        if "raise" in acts:
            raise ValueError("an input that this model cannot compute")
        if "lose" in acts:
            torch.sim.lose()
        if "hang" in acts:
            torch.sim.hang()
        x = batch["x"].to(self.device, non_blocking=True)
        if "fault" in acts:
            self.factor[torch.tensor([10**6]).to(self.device)] = 0
        if self._busy_us:
            torch.sim.busy(self._busy_us)
        y = x * self.factor
        if "nan" in acts:
            y[acts.index("nan")] = torch.nan
        refused = torch.tensor([float(act == "refuse") for act in acts])
        return {"twice": y, "refused": refused}

    def postprocess(self, outputs: Features) -> Features:
        self.steps.append(("postprocess", len(outputs["twice"])))
        if outputs["refused"].any():
            raise RuntimeError("outputs that cannot be finished")
        return {"twice": outputs["twice"]}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        twice = outputs["twice"].unique()
        return {"twice": twice.item() if len(twice) == 1 else twice.tolist()}

    def warmup(self) -> list[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": 1}'))]


class ApartAheadModel(AheadModel):
    """An `AheadModel` without acts, whose instances decoders may prepare."""

    can_run_ahead = True
    prepares_apart = True

    def preprocess(self, item: Item) -> Features:
        return {"x": super().preprocess(item)["x"]}

    def collate(self, instances: Sequence[Features]) -> Features:
        return super().collate([{**each, "do": "ok"} for each in instances])  # type: ignore[dict-item]
