"""Reports what tests cost in CPU seconds, with all processes that they start: `-p tests.costs`.

A plugin for pytest. It puts each process of tests into a control group of its own, since processes
that are killed with their parents are in nobody's account but the group's. Needs Linux with control
groups of version 2, and the right to make one.
"""

import contextlib
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

_NUM_DEAREST = 30
_COST = "cpu_s"
"""The attribute of a report: CPU seconds since the report before it, in the same process."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure in this process, unless it only spreads the tests over others."""
    config.pluginmanager.register(_Summary(), "summary of costs")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Meter(), "meter of costs")


class _Meter:
    """Adds the cost to each report of this process."""

    def __init__(self) -> None:
        (root,) = [
            fields[1]
            for fields in map(str.split, Path("/proc/mounts").read_text().splitlines())
            if fields[2] == "cgroup2"
        ]
        (own,) = [
            line.removeprefix("0::/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        ]
        self._parent = Path(root, own)
        self._group = self._parent / f"tests-{os.getpid()}"
        self._group.mkdir(exist_ok=True)
        self._enter(self._group)
        self._last_s = self._now_s()

    def _now_s(self) -> float:
        usage_usec = (self._group / "cpu.stat").read_text().split()[1]
        return int(usage_usec) / 1e6

    def _enter(self, group: Path) -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    @pytest.hookimpl(tryfirst=True)  # before the report is sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now_s = self._now_s()
        vars(report)[_COST] = now_s - self._last_s
        self._last_s = now_s

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._enter(self._parent)
        with contextlib.suppress(OSError):  # something that tests have started still runs
            self._group.rmdir()


class _Summary:
    """Sums up the costs where the results are shown."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costs: defaultdict[str, float] = defaultdict(float)
        for reports in terminalreporter.stats.values():
            for report in reports:
                if hasattr(report, _COST):
                    costs[report.nodeid] += getattr(report, _COST)
        files: Counter[str] = Counter()
        for nodeid, cost_s in costs.items():
            files[nodeid.partition("::")[0]] += cost_s  # type: ignore[assignment]
        terminalreporter.section("CPU seconds, with all processes that tests have started")
        terminalreporter.write_line(f"{sum(files.values()):9.1f}  in all, {len(costs)} tests")
        for name, found in (("files", files), ("tests", Counter(costs))):
            terminalreporter.write_line(f"the dearest {name}:")
            for key, cost_s in found.most_common(_NUM_DEAREST):
                terminalreporter.write_line(f"{cost_s:9.1f}  {key}")
