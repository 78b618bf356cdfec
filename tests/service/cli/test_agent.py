"""The verb `agent` says at once which of its flags make no sense on this host."""

from argparse import ArgumentParser

import pytest

from inferpool.service.cli.agent import run
from inferpool.service.cli.agent_flags import CLUSTER_KEY_VARIABLE, add_flags
from inferpool.service.settings.names import FlagError


def test_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, "a-key-of-sixteen-bytes-or-more")
    parser = ArgumentParser()
    add_flags(parser)
    arguments = parser.parse_args(["--join", "127.0.0.1:9", "--interface", "nowhere0"])
    with pytest.raises(FlagError, match=r"--interface: there is no network interface nowhere0"):
        run(arguments)
