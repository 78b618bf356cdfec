"""A model whose behaviour is chosen by its input, and whose right answers are known."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from models.base import Features, Item, Model
from models.errors import InputError, ModelError
from models.spec import Placement, TensorSpec

ACTS = ("ok", "raise", "kill", "hang", "exit", "sleep", "rows", "leave")


class FaultModel(Model):
    """Takes {"n": number, "do": act}; answers {"twice": 2 * number, "pid": ..., "batch": ...}."""

    outputs = (TensorSpec(name="twice", dtype="int64", shape=(-1,)),)

    def __init__(
        self,
        *,
        load: str = "ok",
        load_s: float = 0.0,
        forward_s: float = 0.0,
        prepare_s: float = 0.0,
        once: str | None = None,
        calls: str | None = None,
    ) -> None:
        """Choose how to load.

        Args:
            load: "ok", "raise", "wrong" (a permanent error), "exit" or "hang".
            load_s: What loading takes.
            forward_s: What each forward pass takes.
            prepare_s: What each preparation takes.
            once: A file: act on "kill" and "hang" only while it does not exist, and create it.
            calls: A file: the number of each input is written to it before it is computed.
        """
        self._load = load
        self._load_s = load_s
        self._forward_s = forward_s
        self._prepare_s = prepare_s
        self._once = Path(once) if once else None
        self._calls = Path(calls) if calls else None

    def load(self, placement: Placement) -> None:
        time.sleep(self._load_s)
        match self._load:
            case "raise":
                raise RuntimeError("no luck today")
            case "wrong":
                raise ModelError("these are not the weights")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)

    def preprocess(self, item: Item) -> Features:
        time.sleep(self._prepare_s)
        value = item.json()
        if not isinstance(value, dict) or not isinstance(value.get("n"), int):
            raise InputError('an instance is {"n": number, "do": act}')
        return {"x": torch.tensor([value["n"], ACTS.index(value.get("do", "ok"))])}

    def forward(self, batch: Features) -> Features:
        x_BA = batch["x"]
        if self._calls:
            with self._calls.open("a") as file:
                file.write("".join(f"{n}\n" for n in x_BA[:, 0].tolist()))
        time.sleep(self._forward_s)
        for act in x_BA[:, 1].tolist():
            self._act(ACTS[act])
        rows = x_BA[:-1] if ACTS.index("rows") in x_BA[:, 1].tolist() else x_BA
        return {"twice": rows[:, 0] * 2}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        if "fail" in parameters:
            raise InputError("this parameter cannot be")
        return {"twice": int(outputs["twice"]), "pid": os.getpid()}

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": 0}'))]

    def _act(self, act: str) -> None:
        if act in ("kill", "hang") and self._once:
            try:
                self._once.touch(exist_ok=False)
            except FileExistsError:
                return
        match act:
            case "raise":
                raise ValueError("I was told to")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(7)
            case "leave":
                sys.exit(9)
            case "sleep":
                time.sleep(0.3)
