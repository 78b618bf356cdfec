"""An agent finds out where the ranks of its host are for those of other hosts."""

import socket
from dataclasses import replace

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.remote.spread.place import located, place_called, place_with
from inferpool.workers.shared.config import HostPart
from inferpool.workers.shared.errors import WorkerStartError
from tests.workers.contract import config_of

PART = HostPart(first=0, placement=Placement(devices=("cpu",), split="pipeline"), token="t")
HERE = "127.0.0.1"


def test_interface_and_address_lead_to_each_other():
    place = place_called("lo")
    assert place.address == HERE
    assert place_with(HERE) == place
    with pytest.raises(ValueError, match=r"no network interface nowhere0 .*: .*lo"):
        place_called("nowhere0")
    with pytest.raises(ValueError, match=r"192\.0\.2\.1: name one"):
        place_with("192.0.2.1")


def test_the_lead_is_told_to_others_and_listens_until_its_process_does():
    told: list[tuple[str, int]] = []
    config = config_of(part=PART)
    with located(config, "", HERE, lambda *place: told.append(place)) as found:
        assert found.part is not None
        assert told == [(HERE, found.part.port)]
        assert found.part.own_address == HERE
        assert found.part.interface == "lo"
        socket.create_connection(told[0], 20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(told[0], 20)


def test_a_host_that_knows_itself_by_loopback_alone_is_refused():
    part = replace(PART, first=1, address="10.1.2.3", port=7)
    with (
        pytest.raises(WorkerStartError, match=r"127\.0\.0\.1 and at 10\.1\.2\.3 .*--interface"),
        located(config_of(part=part), "lo", HERE, lambda *_: None),
    ):
        pass


def test_worker_that_is_not_spread_needs_no_place():
    config = config_of()
    with located(config, "nowhere0", "", lambda *_: None) as found:
        assert found is config
