"""Kinds of devices that the tests here run on, and the page about a run on GPUs.

Each test runs on the simulated accelerator in every gate, and with `-m gpu` on CUDA devices.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferpool.models.accelerator.device import module_of
from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.spec import Placement
from inferpool.workers.host.devices import find_host
from tests.e2e.running import ROOT
from tests.gpu.results import RunResults

_FOLDER = "GPU_RESULTS"
"""Variable with a folder for the page of results. Without it, only a run on CUDA has a page."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of one kind on this host."""

    kind: str
    """Their type in torch."""

    @property
    def is_simulated(self) -> bool:
        return self.kind == "sim"

    @property
    def module(self):
        """The module that torch has for the kind, such as `torch.cuda`."""
        return module_of(self.kind)

    @property
    def library(self):
        """The module with the functions of NVML."""
        accelerator = accelerator_of(self.kind)
        assert accelerator is not None
        return accelerator.library

    @property
    def uuids(self) -> list[str]:
        host = find_host(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [gpu.uuid for gpu in host.gpus if gpu.kind == self.kind]

    def placement(self, index: int) -> Placement:
        """Return the placement of a replica that this process loads itself."""
        return Placement(devices=(f"{self.kind}:{index}",))

    def named(self, *indices: int) -> str:
        """Return the setting for some devices, such as "cuda:0,1"; skip the test if one lacks."""
        if max(indices) >= len(self.uuids):
            pytest.skip(f"needs {max(indices) + 1} devices; this host has {len(self.uuids)}")
        return f"{self.kind}:{','.join(map(str, indices))}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sim", marks=pytest.mark.simulated),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def devices(request: pytest.FixtureRequest) -> Devices:
    """The kind of devices that a test runs on."""
    found = Devices(kind=request.param)
    if not found.uuids:
        pytest.fail(f"this host has no {found.kind} device; `inferpool doctor` says why")
    return found


@pytest.fixture
def trace_folder(devices: Devices, tmp_path: Path) -> Path:
    """The folder of a test's traces: beside the results, so that they are sent with them."""
    chosen = os.environ.get(_FOLDER) or ("" if devices.is_simulated else "gpu-results")
    return Path(ROOT, chosen) if chosen else tmp_path


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Write the page of results."""
    yield
    reports = [each for some in terminalreporter.stats.values() for each in some]
    if terminalreporter.config.pluginmanager.has_plugin("serving"):
        return  # the process that shows these tests has all of them
    results = RunResults(each for each in reports if isinstance(each, pytest.TestReport))
    chosen = os.environ.get(_FOLDER) or ("gpu-results" if "cuda" in results.kinds else "")
    if chosen:
        page = results.write(Path(ROOT, chosen))
        terminalreporter.section("results to send back")
        terminalreporter.write(page.read_text())
        terminalreporter.write_line(f"written to {page.parent}")
