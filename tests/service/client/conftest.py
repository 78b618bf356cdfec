"""One real service for all tests of the clients, and one way to call both clients."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool.service.client import AsyncClient, Client
from tests.e2e.running import Running, running

CONFIG = """
port = 0
max_queue_length = 3
default_timeout_s = 20.0
[models.echo]
source = "echo"
replicas = 1
[models.classes]
source = "tests.small_classifier:SmallClassifier"
weights = "none"
replicas = 1
[models.fault]
source = "tests.fault_model:FaultModel"
replicas = 1
max_batch_size = 1
[models.pair]
source = "tests.service.client.pair_model:PairModel"
replicas = 1
"""


@pytest.fixture(scope="package")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("client") / "inferpool.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="package")
def service(config: Path) -> Iterator[Running]:
    with running("--config", str(config)) as service:
        yield service


class BlockingAsyncClient:
    """An `AsyncClient` whose methods block, as those of `Client` do."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self.client = client
        self.runner = runner

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            async def wait():
                return await getattr(self.client, name)(*args, **kwargs)

            return self.runner.run(wait())

        return call

    def predict_many(self, inputs, **options):
        results = self.client.predict_many(inputs, **options)
        try:
            while True:
                try:
                    yield self.runner.run(_next(results))
                except StopAsyncIteration:
                    return
        finally:
            self.runner.run(results.aclose())


async def _next(results):
    return await anext(results)


@contextlib.contextmanager
def open_client(kind: str, url: str, **options):
    """Open a client of either kind; both are called in the same way."""
    if kind == "sync":
        with Client(url, **options) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client = AsyncClient(url, **options)
        yield BlockingAsyncClient(client, runner)
        runner.run(client.aclose())


@pytest.fixture(params=["sync", "async"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def client(kind: str, service: Running):
    with open_client(kind, service.url) as client:
        yield client
