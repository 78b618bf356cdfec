"""A service whose workers run under agents, which share the process of the test."""

import asyncio

import pytest

from inferpool.service.app import assemble
from inferpool.service.errors import UnavailableError
from inferpool.service.parts.cluster.door import open_door
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.keys import digest_of
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.devices import find_host
from tests.fakes import ref_to
from tests.service.pools import submit
from tests.workers.contract import until
from tests.workers.remote.cluster import facts_of, make_agent, running

KEY = "k" * 20


async def test_a_service_goes_on_without_hosts_and_serves_with_the_first_that_joins():
    settings = Settings(
        models={"m": ModelSettings(source="echo", replicas=1)},
        default_model="m",
        cluster_keys=read_keys(KEY),
        cluster_port=0,
    )
    door = open_door(settings)
    service = assemble(settings, find_host(""), Console(None), door=door).service
    service.start()
    pool = service.pools["m"]
    with pytest.raises(UnavailableError, match="no host is connected") as caught:
        submit(pool)
    assert caught.value.retry_after_s == 1
    address = door.listener.getsockname()
    agent = make_agent(
        address, key=digest_of(KEY.encode()), facts=facts_of("h", version=version_of())
    )
    async with running(agent):
        await asyncio.wait_for(service.until_settled(), 60)
        result = await pool.submit(ref_to(b"hello"), [b"hello"])
        assert b'"num_bytes":5' in result.value
        (host,) = service.report().hosts
        assert (host.name, host.workers_ready) == ("h", 1)
        assert service.report().models[0].workers[0].host == "h"
    await until(lambda: not pool.slots)
    assert not service._lost.is_set()
    assert service.report().lost_hosts[0].name == "h"
    await service.stop()
