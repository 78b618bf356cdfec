"""Models that do what their input says, and whose right answers are known."""

import contextlib
import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec

ACTS = (
    *("ok", "raise", "kill", "hang", "exit", "sleep", "rows", "leave"),
    *("nan", "shape", "segfault", "spin", "eat", "device", "ill"),
    *("kill early", "hang early", "spin early", "hold early", "wait", "open early", "pretend"),
)
PRINTED = {
    "stdout": ["from Python", "from C"],
    "stderr": ["from Python to stderr", "with two", "lines in one write", "\\xff is no text"],
}
"""Lines that a `NoisyModel` writes, by stream."""
_BIG_BYTES = 8 << 20


class FaultModel(Model):
    """Takes {"n": number, "do": act}; answers {"twice": 2 * number, "pid": ..., "batch": ...}.

    An act that ends in "early" happens while the input is prepared, any other in `forward`.
    """

    outputs = (
        TensorSpec(name="twice", dtype="int64", shape=(-1,)),
        TensorSpec(name="share", dtype="float32", shape=(-1, 2)),
    )

    def __init__(
        self,
        *,
        load: str = "ok",
        load_s: float = 0.0,
        forward_s: float = 0.0,
        prepare_s: float = 0.0,
        max_rows: int = 1000,
        once: str | None = None,
        calls: str | None = None,
        gate: str | None = None,
    ) -> None:
        """Choose how to load.

        Args:
            load: "ok", "raise", "wrong" (a permanent error), "exit", "hang", "kill" or "dumb"
                (its first forward pass after the warm-up and the check hangs).
            load_s: Seconds that loading takes.
            forward_s: Seconds that each forward pass takes.
            prepare_s: Seconds that each preparation takes.
            max_rows: Largest batch that fits into the memory.
            once: A file; an act that ends or blocks the process creates it, and does nothing if it
                exists.
            calls: A file that gets the number of each input before it is computed.
            gate: A file; while it exists, loading goes on, as does "wait". "open" removes it.
        """
        self._load = load
        self._load_s = load_s
        self._forward_s = forward_s
        self._prepare_s = prepare_s
        self._max_rows = max_rows
        self._once = Path(once) if once else None
        self._calls = Path(calls) if calls else None
        self._gate = Path(gate) if gate else None
        self._num_forwards = 0
        self._is_ill = False

    def load(self, placement: Placement) -> None:
        time.sleep(self._load_s)
        self._wait()
        match self._load:
            case "raise":
                raise RuntimeError("no luck today")
            case "wrong":
                raise ModelError("these are not the weights")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "kill" if self._is_first():
                os.kill(os.getpid(), signal.SIGKILL)

    def preprocess(self, item: Item) -> Features:
        time.sleep(self._prepare_s)
        value = item.json()
        if not isinstance(value, dict) or not isinstance(value.get("n"), int):
            raise InputError('an instance is {"n": number, "do": act}')
        act = value.get("do", "ok")
        if act.endswith("early"):
            self._act(act.removesuffix(" early"))
        return {"x": torch.tensor([value["n"], ACTS.index(act)])}

    def forward(self, batch: Features) -> Features:
        x_BA = batch["x"]
        if self._calls:
            with self._calls.open("a") as file:
                file.write("".join(f"{n}\n" for n in x_BA[:, 0].tolist()))
        time.sleep(self._forward_s)
        self._num_forwards += 1
        if self._load == "dumb" and self._num_forwards > 4:
            time.sleep(3600)
        if len(x_BA) > self._max_rows:
            raise torch.OutOfMemoryError(f"{len(x_BA)} rows are too many for me")
        acts = [ACTS[act] for act in x_BA[:, 1].tolist()]
        for act in acts:
            self._act(act)
        rows = x_BA[:-1] if "rows" in acts else x_BA
        share_BS = torch.zeros(len(rows), 3 if "shape" in acts else 2)
        share_BS[[act == "nan" for act in acts[: len(rows)]]] = torch.nan
        if self._is_ill:
            share_BS[:] = torch.inf
        return {"twice": rows[:, 0] * 2, "share": share_BS}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        if "fail" in parameters:
            raise InputError("this parameter cannot be")
        answer: dict[str, object] = {"twice": int(outputs["twice"]), "pid": os.getpid()}
        if "big" in parameters:
            answer["big"] = "x" * _BIG_BYTES
        return answer

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": 0}'))]

    def _act(self, act: str) -> None:
        match act:
            case "raise":
                raise ValueError("I was told to")
            case "sleep":
                time.sleep(0.3)
            case "wait":
                self._wait()
            case "open":
                assert self._gate is not None
                self._gate.unlink()
            case "ill":
                self._is_ill = True
            case "pretend":
                report_progress()
                time.sleep(3600)
            case "kill" | "hang" | "spin" | "segfault" | "eat" | "device" if not self._is_first():
                return
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "hold":
                ctypes.PyDLL(None).usleep(700_000)  # with the GIL
            case "spin":
                re.match(r"(a+)+$", "a" * 64 + "b")  # in C, with the GIL, for years
            case "segfault":
                signal.raise_signal(signal.SIGSEGV)  # in this thread, before it goes on
            case "eat":
                eaten = []
                while True:
                    eaten.append(bytearray(os.urandom(1 << 20)))
                    time.sleep(0.002)
            case "device":
                raise torch.AcceleratorError("CUDA error: device-side assert triggered\nand more")
            case "exit":
                os._exit(7)
            case "leave":
                sys.exit(9)
            case "quit":
                sys.exit(0)

    def _wait(self) -> None:
        while self._gate is not None and self._gate.exists():
            time.sleep(0.01)

    def _is_first(self) -> bool:
        """Return whether `once` allows an act, and note that it was done."""
        try:
            if self._once:
                self._once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def report_progress() -> None:
    """Report, for the next years, that the worker has just made progress."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            if "inferpool-heartbeat" in os.readlink(f"/proc/self/fd/{name}"):
                with mmap.mmap(int(name), mmap.PAGESIZE) as row:
                    row[:] = b"\1" * mmap.PAGESIZE


class ForkingModel(FaultModel):
    """A `FaultModel` whose code starts processes of its own, and leaves them running."""

    def __init__(self, *, children: str, **options: object) -> None:
        """Take a file that gets the pids of the processes, and the options of `FaultModel`."""
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._children = Path(children)

    def load(self, placement: Placement) -> None:
        super().load(placement)
        numbers = DataLoader(list(range(6)), batch_size=2, num_workers=1)
        assert [each.tolist() for each in numbers] == [[0, 1], [2, 3], [4, 5]]
        forked = os.fork()
        if forked == 0:
            time.sleep(600)
            os._exit(0)
        shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
        assert shell.stdout is not None
        pids = [forked, shell.pid, int(shell.stdout.readline())]
        self._children.write_text(" ".join(map(str, pids)))


class TensorFaultModel(FaultModel):
    """A `FaultModel` that declares its inputs: `n`, and `do`, the place of its act in `ACTS`."""

    inputs = (
        TensorSpec(name="n", dtype="int64", shape=(-1,)),
        TensorSpec(name="do", dtype="int64", shape=(-1,)),
    )

    def preprocess(self, item: Item) -> Features:
        features = Model.preprocess(self, item)
        time.sleep(self._prepare_s)
        act = ACTS[int(features["do"])]
        if act.endswith("early"):
            self._act(act.removesuffix(" early"))
        return features

    def forward(self, batch: Features) -> Features:
        return super().forward({"x": torch.stack([batch["n"], batch["do"]], dim=1)})

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(b'{"n": 0, "do": 0}'))]


class GatedModel(FaultModel):
    """A `FaultModel` that loads at once, though its gate is there."""

    def load(self, placement: Placement) -> None:
        pass


class NoisyModel(FaultModel):
    """A `FaultModel` that first writes text, in every way there is but logging."""

    def preprocess(self, item: Item) -> Features:
        print("from Python")  # noqa: T201  # that is the point
        print("from Python to stderr", file=sys.stderr)  # noqa: T201
        os.write(2, b"with two\nlines in one write\n\xff is no text\n")
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        warnings.warn("from the warnings module", stacklevel=1)
        return super().preprocess(item)
