"""The page about a run of these tests on a machine: what to send to the project's authors."""

import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from inferpool.workers.host.nvml import read_nvml

ROOT = Path(__file__).resolve().parents[2]
_KIND = re.compile(r"tests/gpu/.*\[(?:.*-)?(sim|cuda)[-\]]")
"""The parameter of a test that is the kind of its devices."""
_LINES = 12
"""Lines of a failure on the page; the JSON file has all."""


@dataclass(frozen=True, kw_only=True)
class TestEnd:
    """How one test ended, and the figures that it noted by `record_property`."""

    __test__ = False

    name: str
    outcome: str
    seconds: float
    device: str
    figures: Mapping[str, object] = field(default_factory=dict)
    said: str = ""
    """Its failure, or why it was skipped."""


class RunResults:
    """The ends of the tests that ran on a device."""

    def __init__(self, reports: Iterable[pytest.TestReport]) -> None:
        self.ends = [end for end in map(_end_of, reports) if end is not None]

    @property
    def kinds(self) -> set[str]:
        return {end.device for end in self.ends}

    def write(self, folder: Path) -> Path:
        """Write results.json and results.txt; return the path of the latter."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = environment(self.kinds)
        content = {"environment": facts, "tests": [asdict(end) for end in self.ends]}
        text = json.dumps(content, indent=1, default=str)
        Path(folder, "results.json").write_text(text + "\n")
        page = Path(folder, "results.txt")
        page.write_text("\n".join(self._lines(facts)) + "\n")
        return page

    def _lines(self, facts: Mapping[str, object]) -> Sequence[str]:
        lines = [f"{name:10} {value}" for name, value in facts.items()]
        outcomes = [end.outcome for end in self.ends]
        counts = {each: outcomes.count(each) for each in dict.fromkeys(outcomes)}
        total_s = sum(end.seconds for end in self.ends)
        said = ", ".join(f"{num} {outcome}" for outcome, num in counts.items())
        lines += ["", f"{said} in {total_s:.0f} s", ""]
        for end in self.ends:
            lines.append(f"{end.outcome:8} {end.seconds:6.1f} s  {end.name}")
            lines += [f"{'':20}{name}: {value}" for name, value in end.figures.items()]
            if end.outcome != "passed":
                lines += [f"{'':20}{line}" for line in end.said.splitlines()[-_LINES:]]
        return lines


def environment(kinds: Iterable[str] = ()) -> dict[str, object]:
    """Return what this machine and its software are."""
    facts: dict[str, object] = {
        "commit": _first_line("git", "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": torch.get_num_threads(),
    }
    if "cuda" in kinds:
        facts |= _cuda_facts()
    return facts


def _cuda_facts() -> dict[str, object]:
    import pynvml

    state = read_nvml(pynvml)
    facts: dict[str, object] = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": f"{state.driver}, for CUDA up to {'.'.join(map(str, state.cuda))}",
    }
    for gpu in state.gpus:
        facts[f"gpu {gpu.index}"] = (
            f"{gpu.name}, {gpu.total_bytes / 2**30:.0f} GiB, capability {gpu.capability}"
            f"{', MIG' if gpu.is_mig else ''}"
        )
    return facts


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    except OSError:
        return "unknown"
    return done.stdout.partition("\n")[0] or "unknown"


def _end_of(report: pytest.TestReport) -> TestEnd | None:
    """Return the end of a test, if it ran on a device and this is the report that tells."""
    kind = _KIND.search(report.nodeid)
    if kind is None or (report.when != "call" and report.outcome == "passed"):
        return None
    return TestEnd(
        name=report.nodeid.rpartition("/")[2],
        outcome=report.outcome,
        seconds=report.duration,
        device=kind[1],
        figures=dict(report.user_properties),
        said=report.longreprtext,
    )
