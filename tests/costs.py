"""Reports what tests cost in CPU seconds, with all processes that they start: `-p tests.costs`.

A plugin for pytest. It puts each process of tests into a control group of its own, since processes
that are killed with their parents are in nobody's account but the group's. Needs Linux with control
groups of version 2, and the right to make one.
"""

import contextlib
import os
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

_NUM_DEAREST = 30
_COST = "cpu_s"
"""The attribute of a report: CPU seconds since the report before it, in the same process."""
_COLLECTION = "collection_cpu_s"
"""The same for what was before the first report, the import of all files of tests; else 0."""


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
        _remove_groups_left_in(Path(root, own))
        self._group = Path(root, own, f"tests-{os.getpid()}")
        self._group.mkdir(exist_ok=True)
        (self._group / "cgroup.procs").write_text(str(os.getpid()))
        self._last_s = self._now_s()
        self._collection_s = 0.0

    def _now_s(self) -> float:
        usage_usec = (self._group / "cpu.stat").read_text().split()[1]
        return int(usage_usec) / 1e6

    def _lap_s(self) -> float:
        last_s, self._last_s = self._last_s, self._now_s()
        return self._last_s - last_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._collection_s = self._lap_s()

    @pytest.hookimpl(tryfirst=True)  # before the report is sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        vars(report).update({_COST: self._lap_s(), _COLLECTION: self._collection_s})
        self._collection_s = 0.0


def _remove_groups_left_in(parent: Path) -> None:
    """Remove the groups of earlier processes, which could not: they and helpers were in them."""
    for group in parent.glob("tests-*"):
        if not psutil.pid_exists(int(group.name.removeprefix("tests-"))):
            with contextlib.suppress(OSError):  # something still runs there, or it is gone
                group.rmdir()


class _Summary:
    """Sums up the costs where the results are shown."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        costs: defaultdict[str, float] = defaultdict(float)
        collection_s = 0.0
        for reports in terminalreporter.stats.values():
            for report in reports:
                if hasattr(report, _COST):
                    costs[report.nodeid] += getattr(report, _COST)
                    collection_s += getattr(report, _COLLECTION)
        files: Counter[str] = Counter()
        for nodeid, cost_s in costs.items():
            files[nodeid.partition("::")[0]] += cost_s  # type: ignore[assignment]
        terminalreporter.section("CPU seconds, with all processes that tests have started")
        in_all_s = collection_s + sum(files.values())
        terminalreporter.write_line(f"{in_all_s:9.1f}  in all, {len(costs)} tests")
        terminalreporter.write_line(f"{collection_s:9.1f}  collection")
        for name, found in (("files", files), ("tests", Counter(costs))):
            terminalreporter.write_line(f"the dearest {name}:")
            for key, cost_s in found.most_common(_NUM_DEAREST):
                terminalreporter.write_line(f"{cost_s:9.1f}  {key}")
