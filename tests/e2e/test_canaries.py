"""Canaries beside two front ends, while clients ask."""

import asyncio
import itertools
import json
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from inferpool.service.queue.instance import CanaryShare
from inferpool.service.tools.trial.connection import Address, connected, post_request
from tests.e2e.running import Running, until
from tests.e2e.swapping import SwapOperator, serving

_SHARE = 0.3
_NUM_IDS = 40
_PATIENCE_S = 60.0
_COUNT = re.compile(
    r'inferpool_(?:instances_total\{model="m",outcome="(\w+)"\}'
    r'|(requests)_total\{.*model="m".*\}) (\S+)$'
)
_LENIENT = {"max_fault_share": 1, "max_latency_ratio": 1e6, "duration_s": 3600}
"""Nothing ends the canary, so that its whole time can be looked at."""


class IdClients:
    """Clients that ask with ids of their own, each call on a new connection."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._numbers = itertools.count()
        self.num_calls = 0
        self.versions: defaultdict[str, set[int]] = defaultdict(set)
        """The versions that have answered calls with an id."""
        self.num_instances: Counter[int] = Counter()
        """Instances that each version has answered."""
        self.num_refused = 0

    async def ask(self, id: str, acts: Sequence[str] = ("ok",) * 3) -> None:
        """Ask once, and check that one version has answered all of it."""
        asked = [{"n": next(self._numbers), "do": act} for act in acts]
        data = json.dumps({"instances": asked}).encode()
        request = post_request("/predict/m", data, "application/json", {"X-Request-Id": id})
        async with connected(self._address) as connection:
            answer = await connection.ask(request, _PATIENCE_S)
        self.num_calls += 1
        if answer.status == 503:
            self.num_refused += 1
            return
        found = json.loads(answer.body)["predictions"]
        version = int(answer.header(b"x-model-version"))
        assert answer.status == 200, found
        assert [each.get("n") for each in found] == [each["n"] for each in asked], found
        assert len({each["mark"] for each in found}) == 1, found
        self.versions[id].add(version)
        self.num_instances[version] += len(asked)

    async def ask_all(self, num_rounds: int, num_clients: int = 8) -> None:
        """Ask with all ids, several times with each."""
        ids = iter([f"call-{number}" for number in range(_NUM_IDS)] * num_rounds)

        async def be() -> None:
            for id in ids:
                await self.ask(id)

        await asyncio.gather(*(be() for _ in range(num_clients)))


async def begun(service: Running, options: dict[str, object]) -> SwapOperator:
    """Begin to swap, and wait until the canary's share of the traffic is what counts."""
    operator = SwapOperator(service.address)
    request = {
        "policy": "canary", "options": {"mark": 1, **options}, "wait_s": 0, "min_agreement": 0,
        "traffic_share": _SHARE, **_LENIENT,
    }  # fmt: skip
    status, answer = await operator.post("versions", request, Prefer="respond-async")
    assert status == 202, answer
    await operator.until_said("canary: ")
    return operator


async def number_in(operator: SwapOperator, what: str) -> int:
    """Return a number that the change tells of itself."""
    said = (await operator.look())["change"]
    found = re.search(what.replace("N", r"(\d+)"), said)
    assert found, said
    return int(found[1])


def counts_of(service: Running) -> Counter[str]:
    """Return how many instances had each outcome, and how many calls there were."""
    counts: Counter[str] = Counter()
    for line in service.metrics().splitlines():
        if found := _COUNT.match(line):
            counts[found[1] or found[2]] += int(float(found[3]))
    return counts


def check_counts(service: Running, num_calls: int) -> None:
    """Check that every call and every instance is accounted for."""
    # A busy front end may tell its counts later.
    until(lambda: counts_of(service)["requests"] >= num_calls)
    counts = counts_of(service)
    ended = sum(counts[end] for end in ("succeeded", "failed", "expired", "cancelled"))
    assert counts["accepted"] == ended, counts
    assert counts["requests"] == num_calls, counts


@pytest.mark.slow
def test_a_canary_gets_the_same_ids_from_every_front_and_each_call_is_of_one_version():
    asyncio.run(share_by_id())


async def share_by_id() -> None:
    with serving("--front-ends", "2") as service:
        operator = await begun(service, {})
        clients = IdClients(service.address)
        await clients.ask_all(3)
        share = CanaryShare("", _SHARE)
        assert clients.versions == {id: {2 if share.gets(id) else 1} for id in clients.versions}
        assert len(clients.versions) == _NUM_IDS
        assert set(clients.num_instances) == {1, 2}
        said = "canary: N inputs answered"  # anew every half second
        async with asyncio.timeout(_PATIENCE_S):
            while await number_in(operator, said) < clients.num_instances[2]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await number_in(operator, said) == clients.num_instances[2]
        check_counts(service, clients.num_calls)
        fronts = service.get("/health").json()["fronts"]
        assert len(fronts) == 2


@pytest.mark.slow
def test_calls_whose_workers_die_during_a_canary_stay_with_their_version(tmp_path):
    asyncio.run(kill_workers(str(tmp_path)))


async def kill_workers(folder: str) -> None:
    with serving("--front-ends", "2", options={"once": f"{folder}/old"}) as service:
        await begun(service, {"once": f"{folder}/new"})
        clients = IdClients(service.address)
        share = CanaryShare("", _SHARE)
        ids = [f"call-{number}" for number in range(_NUM_IDS)]
        one_of_new = next(id for id in ids if share.gets(id))
        one_of_old = next(id for id in ids if not share.gets(id))
        asking = asyncio.create_task(clients.ask_all(3))
        for id in (one_of_new, one_of_old):
            await clients.ask(id, ("ok", "kill", "ok", "ok"))
        for pid in await asyncio.to_thread(service.worker_pids):
            os.kill(pid, signal.SIGKILL)
        await asking
        await clients.ask_all(1)
        assert clients.versions == {id: {2 if share.gets(id) else 1} for id in ids}
        assert service.metric('instances_retried_total{model="m"}') > 0
        check_counts(service, clients.num_calls)
