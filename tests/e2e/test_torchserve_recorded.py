"""TorchServe's archives and recorded calls: the same answers as from TorchServe itself."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.clients.torchserve.archives import write_store
from tests.clients.torchserve.differences import meant_statuses
from tests.clients.torchserve.exchange import ask_all, difference
from tests.clients.torchserve.real import ADDRESSES, write_config
from tests.clients.torchserve.side_by_side import RECORDED
from tests.e2e.running import running

KEY = "an-admin-key-of-the-tests"
Answers = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def recorded() -> Answers:
    found: Answers = json.loads(RECORDED.read_text())
    return found


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("torchserve")
    config, ports = write_config(folder, write_store(folder))
    env = {"INFERPOOL_ADMIN_KEYS": KEY}
    with running("--torchserve", str(config), env=env) as service:
        ports["inference"] = service.address[1]
        yield ask_all(ports, KEY)


@pytest.mark.parametrize("server", ADDRESSES)
def test_recorded_calls_are_answered_as_torchserve_does(
    server: str, recorded: Answers, answered: Answers
) -> None:
    meant = meant_statuses()
    assert recorded[server].keys() == answered[server].keys()
    wrong = {
        call: text
        for call, told in recorded[server].items()
        if (server, call) not in meant and (text := difference(told, answered[server][call]))
    }
    assert not wrong, "\n".join(f"{call}: {text}" for call, text in wrong.items())


def test_what_is_answered_otherwise_has_the_status_that_is_meant(
    recorded: Answers, answered: Answers
) -> None:
    meant = meant_statuses()
    found = {(server, call): answered[server][call]["status"] for server, call in meant}
    assert found == meant
    same = [
        call
        for server, call in meant
        if not difference(recorded[server][call], answered[server][call])
    ]
    assert not same, "these need no exception any more"
