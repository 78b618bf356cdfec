"""Plugin of the pytest process with the simulated accelerator: runs what `forwarding` asks for."""

import os
from multiprocessing.connection import Connection
from typing import Any

import pytest


class Serving:
    """Runs tests that come by name through a pipe, and sends their reports back."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._reports: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the other process closes the pipe."""
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                name, following = self._pipe.recv()
            except EOFError:
                return True
            self._reports = []
            item, nextitem = items[name], items.get(following)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            session.shouldfail = session.shouldstop = False
            self._pipe.send(self._reports)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a report, to be sent when the test has ended."""
        config = self._config
        self._reports.append(
            config.hook.pytest_report_to_serializable(config=config, report=report)
        )

    @pytest.hookimpl
    def pytest_configure(self, config: pytest.Config) -> None:
        """Remember the configuration."""
        self._config = config


def pytest_configure(config: pytest.Config) -> None:
    """Begin to serve on the pipe that this process was given."""
    pipe = os.environ.pop("SIM_TESTS_PIPE", None)
    if pipe is not None:
        config.pluginmanager.register(Serving(Connection(int(pipe))), "serving")
