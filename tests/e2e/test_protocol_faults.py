"""Faults and limits under calls of each protocol: the same promises as for `/predict`."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.protocols import (
    ONLY_MODELS,
    PLATFORMS,
    PROTOCOLS,
    VERTEX_ROUTE,
    FaultClient,
    ProtocolAnswer,
    ProtocolTally,
    asking_by_all,
    client_of,
    model_of,
    until_each_has,
)
from tests.e2e.running import Running, running, until
from tests.e2e.swapping import ADMIN, KEYS
from tests.fault_archive import make_fault_archive
from tests.ports import free_port

BY_EACH = pytest.mark.parametrize("protocol", PROTOCOLS + PLATFORMS)
SOURCE, TEXTS = "tests.fault_model:TensorFaultModel", "tests.text_model:TextFaultModel"
MAX_QUEUE = 24
FAILED = {"tei": 424, "torchserve": 503}
"""The status for an error of a model, where it is not 500."""
DEADLY = {"tei": 424}
"""The status for an input that kills its workers, where it is not 500."""
REFUSED = {"torchserve": 503}
"""The status while the queue is full, where it is not 429."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A service, the port of its gRPC, the folder of its models' files, and its protocols."""

    service: Running
    grpc_port: int
    folder: Path
    protocols: Sequence[str] = PROTOCOLS

    def asking(self) -> contextlib.AbstractAsyncContextManager[Mapping[str, ProtocolTally]]:
        """Have clients of all its protocols ask during the block."""
        return asking_by_all(self.service, self.grpc_port, self.protocols)

    def by(self, protocol: str, act: Callable[[FaultClient], Awaitable[None]]) -> None:
        """Run an act with a client of a protocol."""

        async def go() -> None:
            async with client_of(protocol, self.service, self.grpc_port) as client:
                await act(client)

        asyncio.run(go())

    def count(self, outcome: str, protocol: str) -> int:
        """Return the number of instances of the model whose pass waits at the gate."""
        labels = f'model="{model_of(protocol, "gated")}",outcome="{outcome}"'
        return int(self.service.metric(f"instances_total{{{labels}}}"))

    def has_computed(self, n: int) -> bool:
        return f"{n}" in (self.folder / "calls").read_text().split()

    async def until_computing(self, n: int) -> None:
        await asyncio.to_thread(until, lambda: self.has_computed(n))

    def is_empty(self) -> bool:
        """Return whether nothing is left of any call."""
        in_flight = 'instances_in_flight{model="%s"}'
        names = ("m", "gated", "poisoned", *ONLY_MODELS.values())
        return self.service.metric("arena_used_bytes") == 0 and not any(
            self.service.metric(in_flight % name) for name in names
        )


@contextlib.contextmanager
def struck(folder: Path, *arguments: str, **models: dict[str, object]) -> Iterator[Struck]:
    """Start a service of several `TensorFaultModel`s."""
    (folder / "calls").touch()
    port = free_port()
    files = {name: str(folder / name) for name in ("calls", "gate")}
    once = {"once": str(folder / "once")}
    texts: dict[str, object] = {"source": TEXTS, "max_batch_size": 1, "batch_timeout_s": 6.0}
    archive = make_fault_archive(folder / "archive.mar", {**files, **once})
    settings = {
        "tei": True,
        "torchserve": str(_properties(folder)),
        "arena_bytes": 1 << 26,
        "max_queue_length": MAX_QUEUE,
        "grpc_port": port,
        "drain_timeout_s": 60.0,
        "models": {
            name: {"source": SOURCE, "replicas": 1, **model}
            for name, model in {
                "m": {"options": once, "batch_timeout_s": 1.0},
                "gated": {"options": files, "max_batch_size": 1},
                "encoder": texts | {"options": files | once | {"task": "embedding"}},
                "reranker": texts | {"options": files | once | {"task": "reranking"}},
                "archive": texts | {"source": str(archive)},
                **models,
            }.items()
        },
    }
    with running(*arguments, settings=settings, env=KEYS) as service:
        yield Struck(service, port, folder)


def _properties(folder: Path) -> Path:
    """Write TorchServe's settings with addresses of our own."""
    file = folder / "config.properties"
    names = ("management_address", "metrics_address")
    file.write_text("".join(f"{name}=http://127.0.0.1:{free_port()}\n" for name in names))
    return file


@contextlib.contextmanager
def struck_platform(folder: Path, *arguments: str) -> Iterator[Struck]:
    """Start a service of one `TensorFaultModel` for the protocols of platforms."""
    (folder / "calls").touch()
    options = {name: str(folder / name) for name in ("calls", "gate", "once")}
    invoked = {
        "source": SOURCE,
        "replicas": 1,
        "max_batch_size": 1,
        "batch_timeout_s": 6.0,
        "options": options,
    }
    settings = {
        "sagemaker": True,
        "vertex_predict_route": VERTEX_ROUTE,
        "max_queue_length": MAX_QUEUE,
        "models": {"invoked": invoked},
    }
    with running(*arguments, settings=settings, env=KEYS) as service:
        yield Struck(service, 0, folder, PLATFORMS)


@pytest.fixture(scope="module")
def struck_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    with struck(tmp_path_factory.mktemp("struck"), poisoned={}) as found:
        yield found


@pytest.fixture(scope="module")
def struck_platform_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    with struck_platform(tmp_path_factory.mktemp("platform")) as found:
        yield found


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Struck]:
    """The shared service, whole; nothing may be left of the calls of a test."""
    protocol = getattr(request.node, "callspec", None) and request.node.callspec.params["protocol"]
    name = "struck_platform_service" if protocol in PLATFORMS else "struck_service"
    found: Struck = request.getfixturevalue(name)
    found.service.wait_until_full()
    (found.folder / "once").unlink(missing_ok=True)
    yield found
    until(found.is_empty)


def right(n: int) -> ProtocolAnswer:
    return ProtocolAnswer(status=200, twice=2 * n)


def number(protocol: str, place: int) -> int:
    """Return a number that no other test sends, an odd one."""
    return 100_000 * (1 + (PROTOCOLS + PLATFORMS).index(protocol)) + 1_000 * place + 1


def test_killed_workers_cost_no_call_of_any_protocol(target: Struck):
    async def go() -> None:
        async with target.asking() as tallies:
            await until_each_has(tallies, 5)
            for pid in await asyncio.to_thread(target.service.worker_pids):
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(target.service.wait_until_full)
            await until_each_has(tallies, 5)
        for protocol, tally in tallies.items():
            assert (protocol, tally.wrong, tally.lost) == (protocol, [], 0)

    asyncio.run(go())


@BY_EACH
def test_the_call_of_a_hung_worker_is_answered_by_the_next(target: Struck, protocol: str):
    n = number(protocol, 0)
    hangs = f'worker_restarts_total{{model="{model_of(protocol, "m")}",reason="hang"}}'
    before = target.service.metric(hangs)

    async def go(client: FaultClient) -> None:
        assert await client.ask(n, "hang") == right(n)

    target.by(protocol, go)
    assert target.service.metric(hangs) > before


@BY_EACH
def test_a_client_that_hangs_up_gives_its_instances_up(target: Struck, protocol: str):
    n = number(protocol, 1)

    def num(outcome: str) -> int:
        return target.count(outcome, protocol)

    cancelled, accepted = num("cancelled"), num("accepted")
    gate = target.folder / "gate"

    async def go(client: FaultClient) -> None:
        gate.touch()
        asked = [asyncio.ensure_future(client.ask(n, "wait", model="gated"))]
        await target.until_computing(n)
        asked.append(asyncio.ensure_future(client.ask(n + 1, model="gated")))
        await asyncio.to_thread(until, lambda: num("accepted") == accepted + 2)
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)
        await asyncio.to_thread(until, lambda: num("cancelled") == cancelled + 2)
        gate.unlink()
        assert await client.ask(n + 2, model="gated") == right(n + 2)

    target.by(protocol, go)


@BY_EACH
def test_a_full_queue_refuses_and_answers_what_it_took(target: Struck, protocol: str):
    n, gate = number(protocol, 2), target.folder / "gate"

    async def go(client: FaultClient) -> None:
        gate.touch()
        held = asyncio.ensure_future(client.ask(n, "wait", model="gated"))
        await target.until_computing(n)
        more = range(n + 1, n + 1 + 2 * MAX_QUEUE)
        asked = {each: asyncio.ensure_future(client.ask(each, model="gated")) for each in more}
        async with asyncio.timeout(60):
            while not all(each.done() for each in asked.values()):
                refused = [each for each in asked.values() if each.done()]
                if len(refused) >= MAX_QUEUE - 6:  # the worker has a few ahead of the queue
                    gate.unlink(missing_ok=True)
                await asyncio.sleep(0.02)
        assert await held == right(n)
        answers = {each: await answer for each, answer in asked.items()}
        refusal = REFUSED.get(protocol, 429)
        assert {answer.status for answer in answers.values()} == {200, refusal}
        for each, answer in answers.items():
            assert answer == right(each) if answer.status == 200 else answer.error

    target.by(protocol, go)


@BY_EACH
@pytest.mark.parametrize("timeout_ms", [150, 151])
def test_a_deadline_that_passes_is_said_and_its_instance_not_computed(
    target: Struck, protocol: str, timeout_ms: int
):
    n, gate = number(protocol, 3) + 10 * timeout_ms, target.folder / "gate"

    def num_kept() -> int:
        accepted, expired, cancelled = (
            target.count(each, protocol) for each in ("accepted", "expired", "cancelled")
        )
        return accepted - expired - cancelled

    before = num_kept()

    async def go(client: FaultClient) -> None:
        gate.touch()
        held = asyncio.ensure_future(client.ask(n, "wait", model="gated"))
        await target.until_computing(n)
        late = await client.ask(n + 1, model="gated", timeout_ms=timeout_ms)
        assert late.status == 504
        assert late.error
        gate.unlink()
        assert await held == right(n)
        assert await client.ask(n + 2, model="gated") == right(n + 2)

    target.by(protocol, go)
    assert not target.has_computed(n + 1)
    until(lambda: num_kept() == before + 2)  # the late one may have come too late to be accepted


@BY_EACH
def test_an_error_of_the_model_is_an_error_of_its_call_alone(target: Struck, protocol: str):
    n = number(protocol, 4)

    async def go(client: FaultClient) -> None:
        failed, fine = await asyncio.gather(client.ask(n, "raise"), client.ask(n + 1))
        assert failed.status == FAILED.get(protocol, 500)
        assert failed.error
        assert fine == right(n + 1)

    target.by(protocol, go)


@BY_EACH
def test_an_input_that_kills_its_workers_is_quarantined(target: Struck, protocol: str):
    n = number(protocol, 5)

    async def go(client: FaultClient) -> None:
        deadly = await client.ask(n, "kill", model="poisoned")
        assert deadly.status == DEADLY.get(protocol, 500)
        await asyncio.to_thread(target.service.wait_until_full)
        again = await client.ask(n, "kill", model="poisoned")
        assert again.status in (400, 422)
        assert "worker" in again.error
        assert await client.ask(n + 1, model="poisoned") == right(n + 1)

    target.by(protocol, go)


def test_a_swap_under_calls_of_all_protocols_costs_none(target: Struck):
    once, calls, gate = ({name: str(target.folder / name)} for name in ("once", "calls", "gate"))
    options = {
        "m": once,
        "encoder": {"task": "embedding", **once, **calls, **gate},
        "reranker": {"task": "reranking", **once, **calls, **gate},
    }

    async def go() -> None:
        async with target.asking() as tallies:
            await until_each_has(tallies, 5)
            for model, own in options.items():
                swapped = await asyncio.to_thread(
                    target.service.post,
                    f"/admin/models/{model}/versions",
                    json={"policy": "force", "rollback_s": 0, "options": own},
                    headers={"x-api-key": ADMIN},
                )
                assert swapped.status_code == 200, swapped.text
            await until_each_has(tallies, 5)
        for protocol, tally in tallies.items():
            assert (protocol, tally.wrong, tally.lost) == (protocol, [], 0)

    asyncio.run(go())


def test_a_service_that_ends_answers_what_it_took_by_each_protocol(tmp_path: Path):
    gate = tmp_path / "gate"

    def num_accepted(ending: Struck) -> int:
        asked = ("v1", "embeddings", "rerank", "torchserve")
        return sum(ending.count("accepted", each) for each in asked)

    async def go(ending: Struck) -> None:
        service = ending.service
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(client_of(each, service, ending.grpc_port))
                for each in PROTOCOLS
            ]
            gate.touch()
            asked = {
                n: asyncio.ensure_future(client.ask(n, "wait", model="gated"))
                for n, client in enumerate(clients, 1)
            }
            await asyncio.to_thread(until, lambda: num_accepted(ending) == len(clients))
            service.signal(signal.SIGTERM)
            await asyncio.to_thread(service.wait_for_log, "stopping")
            gate.unlink()
            for n, answer in asked.items():
                assert await answer == right(n)
        assert await asyncio.to_thread(service.wait) == 0

    with struck(tmp_path, "--front-ends", "2") as ending:
        asyncio.run(go(ending))


def front_pids(service: Running) -> list[int]:
    """Return the pids of the front ends besides the main process."""
    fronts = service.get("/health").json()["fronts"]
    return [front["pid"] for front in fronts if front["pid"] != service.process.pid]


def test_a_killed_front_end_loses_its_own_calls_alone(tmp_path: Path):
    async def go(two: Struck) -> None:
        async with two.asking() as tallies:
            await until_each_has(tallies, 5)
            victim = (await asyncio.to_thread(front_pids, two.service))[0]
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(two.service.wait_until_full)
            await until_each_has(tallies, 5)
        for protocol, tally in tallies.items():
            assert (protocol, tally.wrong) == (protocol, [])
            assert tally.lost <= 2
        assert tallies["grpc"].lost == 0  # the main process has these calls

    with struck(tmp_path, "--front-ends", "2") as two:
        asyncio.run(go(two))
        until(two.is_empty)


def test_kills_and_a_swap_cost_calls_of_platforms_nothing(tmp_path: Path):
    options = {name: str(tmp_path / name) for name in ("calls", "gate", "once")}

    async def go(two: Struck) -> None:
        service = two.service
        async with two.asking() as tallies:
            await until_each_has(tallies, 5)
            for pid in await asyncio.to_thread(service.worker_pids):
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(service.wait_until_full)
            await until_each_has(tallies, 5)
            swapped = await asyncio.to_thread(
                service.post,
                "/admin/models/invoked/versions",
                json={"policy": "force", "rollback_s": 0, "options": options},
                headers={"x-api-key": ADMIN},
            )
            assert swapped.status_code == 200, swapped.text
            await until_each_has(tallies, 5)
            assert [tally.lost for tally in tallies.values()] == [0, 0]
            os.kill((await asyncio.to_thread(front_pids, service))[0], signal.SIGKILL)
            await asyncio.to_thread(service.wait_until_full)
            await until_each_has(tallies, 5)
        for protocol, tally in tallies.items():
            assert (protocol, tally.wrong) == (protocol, [])
            assert tally.lost <= 2
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) == 0

    with struck_platform(tmp_path, "--front-ends", "2") as two:
        asyncio.run(go(two))
