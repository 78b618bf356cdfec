"""Builds the stand-ins for NVIDIA's driver, and runs real processes with them.

The real pynvml and the real CUDA runtime load them as they would load the driver. They know GPUs
by a description, tell them in the orders of NVML and of CUDA, and take down who called what.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.nodes import Node
from inferpool.workers.host.nvml import GpuState, NvmlState

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}
NOT_SUPPORTED, NO_PERMISSION, NOT_LOADED, IS_LOST, MISMATCH = 3, 4, 9, 15, 18
"""Numbers of NVML's errors: `nvmlReturn_t`."""

_FIND = """
import dataclasses, os, pathlib
from inferpool.workers.host.devices import find_host

names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
visible, order = map(os.environ.get, names)
sys = pathlib.Path(os.environ.get("FAKE_SYS", "/sys"))
answer = dataclasses.asdict(find_host(visible, order or "", sys=sys))
"""
_READ = """
import dataclasses, pynvml
from inferpool.workers.host.nvml import read_nvml

answer = dataclasses.asdict(read_nvml(pynvml))
"""
Values = Mapping[str, object]


def h100(**values: object) -> Values:
    """Return what describes a GPU of 80 GiB; functions that are named fail with that error."""
    usual = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30, "speed": 90, "persistence": 1}
    return {**usual, "compute_mode": 0, "ecc_errors": 0, "power_mw": 70_000, **values}


def t4(**values: object) -> Values:
    """Return what describes a GPU that is slower, and has less memory."""
    return h100(**{"name": "Tesla T4", "memory": 16 << 30, "speed": 10, **values})


def mig_slice(whole: str, **values: object) -> Values:
    """Return what describes a slice of a GPU."""
    return {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "memory": 10 << 30, "slice_of": whole} | {
        **values
    }


@dataclass(frozen=True)
class DriverCall:
    """One call of a function of the driver."""

    pid: int
    function: str
    who: str
    """UUID that it was about, or "driver"."""
    visible: str
    """CUDA_VISIBLE_DEVICES of the process at that time; "-" if it is not set."""
    order: str
    """CUDA_DEVICE_ORDER, likewise."""


class FakeDriver:
    """The driver of a machine that a test describes; skips the test if it cannot be built."""

    def __init__(self, folder: Path, gpus: Mapping[str, Values], **driver: object) -> None:
        self._description = folder / "machine.txt"
        self._log = folder / "calls.txt"
        self.describe(gpus, **driver)
        self.env = {
            "LD_LIBRARY_PATH": str(_built()),
            "FAKE_DRIVER": str(self._description),
            "FAKE_DRIVER_LOG": str(self._log),
            "PYTHONPATH": str(ROOT),
        }
        """Variables with which a process finds this driver."""

    def describe(self, gpus: Mapping[str, Values], **driver: object) -> None:
        """Describe the machine anew, by UUID in the order of NVML; running processes see it."""
        host = {"version": "580.82.07", "cuda": 13020, **driver}
        lines = [
            f"{who} {key} {value}\n"
            for who, values in {"driver": host, **gpus}.items()
            for key, each in values.items()
            for value in (each if isinstance(each, list) else [each])
        ]
        written = self._description.with_suffix(".new")
        written.write_text("".join(lines))
        written.replace(self._description)

    def calls(self, function: str = "") -> list[DriverCall]:
        """Return the calls of all processes so far, or those of one function."""
        if not self._log.exists():
            return []
        fields = [line.split("\t") for line in self._log.read_text().splitlines()]
        every = [DriverCall(int(pid), *rest) for pid, *rest in fields]
        return [call for call in every if function in ("", call.function)]

    def start(self, code: str, **env: str) -> "subprocess.Popen[str]":
        """Start Python code in a process that has this driver."""
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**_own_environment(), **self.env, **env},
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def host(self, **env: str) -> Host:
        """Return what a process with this environment finds on this machine."""
        found = self.ask(_FIND, **env)
        gpus = tuple(Gpu(**{**gpu, "cpus": tuple(gpu["cpus"])}) for gpu in found["gpus"])
        nodes = tuple(Node(**{**node, "cpus": tuple(node["cpus"])}) for node in found["nodes"])
        return Host(**{**found, "cpus": tuple(found["cpus"]), "gpus": gpus, "nodes": nodes})

    def state(self) -> NvmlState:
        """Return the state of the driver and its GPUs, as a process on this machine reads it."""
        found = self.ask(_READ)
        gpus = [
            GpuState(**{**gpu, "capability": tuple(gpu["capability"] or ()) or None})
            for gpu in found["gpus"]
        ]
        return NvmlState(**{**found, "cuda": tuple(found["cuda"]), "gpus": gpus})

    def ask(self, code: str, **env: str) -> Any:
        """Return what Python code assigns to `answer`, in a process that has this driver."""
        process = self.start(f"{code}\nimport json; print(json.dumps(answer))", **env)
        answer, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        return json.loads(answer.splitlines()[-1])


def _own_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}


@functools.cache
def _built() -> Path:
    """Return the folder of the libraries. They are built again when their code changes."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("install gcc: it builds the stand-ins for NVIDIA's driver")
    sources = sorted(_HERE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"inferpool-fake-driver-{os.getuid()}-{digest}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for source, library in _LIBRARIES.items():
        if (folder / library).exists():
            continue
        built = folder / f"{library}.{os.getpid()}"
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-fvisibility=hidden"]
        subprocess.run(
            [compiler, "-D_GNU_SOURCE", *options, "-o", built, _HERE / source, "-ldl"], check=True
        )
        built.replace(folder / library)
    return folder
