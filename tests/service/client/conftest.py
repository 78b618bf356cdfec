"""One real service for all tests of the clients, and one way to call both clients."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from inferpool.service.client import AsyncClient, AsyncJob, Client
from tests.e2e.running import Running, running

CONFIG = """
port = 0
max_queue_length = 3
default_timeout_s = 60.0
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
[models.counts]
source = "tests.streaming_model:JoiningStream"
replicas = 1
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


class Blocking:
    """An `AsyncClient` or `AsyncJob` whose methods block, as those of `Client` and `Job` do."""

    def __init__(self, inner: AsyncClient | AsyncJob, runner: asyncio.Runner) -> None:
        self.inner = inner
        self.runner = runner

    def __getattr__(self, name: str):
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            result = found(*args, **kwargs)
            if isinstance(result, AsyncIterator):
                return self.iterate(result)
            return self.blocking(self.runner.run(result))

        return call

    def __iter__(self):
        return self.iterate(aiter(self.inner))

    def iterate(self, results):
        """Yield what an async generator yields, and close it at the end."""
        try:
            while True:
                try:
                    yield self.blocking(self.runner.run(_next(results)))
                except StopAsyncIteration:
                    return
        finally:
            self.runner.run(results.aclose())

    def blocking(self, value):
        """Return a value; a job can be used like a `Job`."""
        return Blocking(value, self.runner) if isinstance(value, AsyncJob) else value


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
        yield Blocking(client, runner)
        runner.run(client.aclose())


@pytest.fixture(params=["sync", "async"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def client(kind: str, service: Running):
    with open_client(kind, service.url, timeout_s=60) as client:
        yield client


def problem_of(status: int, code: str, *, is_retryable: bool = False) -> httpx.Response:
    """Return a refusal of the service."""
    return httpx.Response(
        status,
        headers={"content-type": "application/problem+json"},
        json={"code": code, "detail": "no", "retryable": is_retryable},
    )
