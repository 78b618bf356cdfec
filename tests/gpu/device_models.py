"""Models that use a device in ways whose right answers are known, or break it as an input says."""

import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from inferpool.models.accelerator.device import module_of
from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from tests.models.items import tensor_item

ACTS = ("ok", "assert", "meet")
WIDTH = 256
"""Numbers in an input of `ExactModel`."""
MODULUS = 997
_MEET_S = 30.0


class DeviceFaultModel(Model):
    """Takes {"n": number, "do": act, "share": part of the memory}; answers {"twice": 2 * number}.

    "assert" indexes beyond the end of a table. "meet" waits in `forward` until a later input has
    been prepared, and fails if none is.
    """

    outputs = (TensorSpec(name="twice", dtype="int64", shape=(-1,)),)

    def __init__(self, *, lost: str | None = None, forward_s: float = 0.0) -> None:
        """Choose how it fails.

        Args:
            lost: A file; the device whose UUID is in it is lost to all processes (simulated).
            forward_s: Seconds that each forward pass takes at least.
        """
        self._lost = Path(lost) if lost else None
        self._forward_s = forward_s
        self._prepared = threading.Condition()
        self._num_prepared = 0

    def load(self, placement: Placement) -> None:
        self._device = torch.device(placement.devices[0])
        self._module = module_of(self._device)
        properties = self._module.get_device_properties(self._device)
        self._num_bytes = properties.total_memory
        self._uuid = str(properties.uuid)
        self._lose_device()
        torch.ones(1, device=self._device).sum().item()

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        if not isinstance(value, dict) or value.get("do", "ok") not in ACTS:
            raise InputError('an instance is {"n": number, "do": act, "share": number}')
        with self._prepared:
            self._num_prepared += 1
            place = self._num_prepared
            self._prepared.notify_all()
        return {
            "n": torch.tensor(value["n"]),
            "share": torch.tensor(float(value.get("share", 0))),
            "do": torch.tensor(ACTS.index(value.get("do", "ok"))),
            "place": torch.tensor(place),
        }

    def forward(self, batch: Features) -> Features:
        self._lose_device()
        time.sleep(self._forward_s)
        n = batch["n"].to(self._device, non_blocking=True)
        num_bytes = int(batch["share"].sum() * self._num_bytes)
        taken = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for act, place in zip(batch["do"].tolist(), batch["place"].tolist(), strict=True):
            self._act(ACTS[act], place)
        del taken
        return {"twice": n * 2}

    def render(self, outputs: Features, parameters: object) -> object:
        return {"twice": int(outputs["twice"]), "device": self._uuid}

    def warmup(self) -> list[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": -1}'))]

    def _act(self, act: str, place: int) -> None:
        if act == "assert":
            table = torch.zeros(4, device=self._device)
            table[torch.full((1,), 9, device=self._device)].sum()
            self._module.synchronize()
        elif act == "meet":
            with self._prepared:
                if not self._prepared.wait_for(lambda: self._num_prepared > place, _MEET_S):
                    raise TimeoutError("no later input was prepared meanwhile")

    def _lose_device(self) -> None:
        uuid = self._lost.read_text() if self._lost and self._lost.exists() else ""
        if uuid and uuid in self._uuid:
            self._module.lose(self._device)


class ExactModel(Model):
    """Turns whole numbers into others, in many small steps whose rounding changes nothing."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, WIDTH)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, WIDTH)),)
    has_fixed_shapes = True

    def load(self, placement: Placement) -> None:
        self._device = torch.device(placement.devices[0])
        self.network = self.load_network(Steps, None, placement)

    def forward(self, batch: Features) -> Features:
        x = batch["x"].to(self._device, non_blocking=True)
        return {"y": self.network(x)}  # type: ignore[dict-item]  # a tensor

    def warmup(self) -> list[Item]:
        return [tensor_item({"x": numbers(0)})]

    def samples(self) -> list[Item]:
        return [tensor_item({"x": numbers(number)}) for number in range(8)]


class Steps(nn.Module):
    """Steps in float32 that are exact: all values are whole and below 2 ** 24.

    A multiplication by a permutation is exact in TF32, too, which keeps 11 bits.
    """

    def __init__(self) -> None:
        super().__init__()
        permutation = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(torch.eye(WIDTH)[permutation], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.remainder(x * 3 + 1, MODULUS)
            x = x @ self.weight
        return x


def numbers(seed: int) -> Tensor:
    """Return the input of a number: whole numbers below the modulus."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(MODULUS, (WIDTH,), generator=generator).float()
