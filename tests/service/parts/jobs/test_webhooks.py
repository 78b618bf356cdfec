"""Webhooks are told once that a job is over, with a signature, and only on allowed hosts."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import httpx
import pytest

from inferpool.service.errors import ServiceError, UnavailableError
from inferpool.service.parts.jobs import webhooks
from inferpool.service.parts.jobs.records import DueWebhook, Job, WaitingWebhook
from inferpool.service.parts.jobs.webhooks import Webhooks, is_public, read_secret

SECRET = b"s" * 24


class Receiver:
    """A server that keeps what it is sent, and answers with one status after another."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self.statuses = list(statuses)
        self.calls: list[tuple[str, dict[str, str], bytes]] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): text for name, text in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.calls.append((first, headers, body))
        status = self.statuses.pop(0)
        location = "location: http://127.0.0.1:1/\r\nset-cookie: a=b\r\n"
        writer.write(f"HTTP/1.1 {status} x\r\n{location}content-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(statuses)
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver


class OneJob:
    """A store with one job that is over."""

    def __init__(self, url: str, num_attempts: int = 0) -> None:
        self.calls = [WaitingWebhook(number=1, owner="", receiver=" it")]
        self.due = DueWebhook(call=self.calls[0], job=ended(url), num_attempts=num_attempts)
        self.noted: asyncio.Queue[float | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def waiting_webhooks(
        self, limit: int, now: float, busy: Collection[str]
    ) -> Sequence[WaitingWebhook]:
        return self.calls

    def take_webhooks(
        self, calls: Sequence[WaitingWebhook], lease_s: float, now: float
    ) -> Sequence[DueWebhook]:
        self.calls = []
        return [self.due]

    def note_webhook(self, number: int, next_at: float | None) -> None:
        self._loop.call_soon_threadsafe(self.noted.put_nowait, next_at)

    def postpone_webhooks(self, receiver: str, until: float) -> None: ...


def ended(url: str) -> Job:
    return Job(
        id="a1",
        owner="",
        folder="f1",
        state="succeeded",
        model="m",
        num_instances=3,
        num_done=3,
        num_bytes=0,
        created_at=1.0,
        ended_at=2.0,
        webhook=url,
    )


async def tell(hooks: Webhooks, store: OneJob) -> float | None:
    task = asyncio.create_task(hooks.run(store))
    try:
        async with asyncio.timeout(60):
            return await store.noted.get()
    finally:
        task.cancel()


async def test_the_event_is_signed() -> None:
    async with receiving(204) as receiver:
        hooks = Webhooks(["localhost"], SECRET)
        store = OneJob(f"http://localhost:{receiver.port}/told?x=1")
        assert await tell(hooks, store) is None
    assert hooks.num_calls == {"told": 1, "failed": 0, "given_up": 0}
    ((first, headers, body),) = receiver.calls
    assert first == "POST /told?x=1 HTTP/1.1"
    assert headers["host"] == f"localhost:{receiver.port}"
    assert headers["webhook-id"] == "msg_f1"
    signed = f"msg_f1.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.digest(SECRET, signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"].removeprefix("v1,") == signature
    event = json.loads(body)
    assert event["type"] == "inferpool.job.succeeded"
    assert event["time"] == "1970-01-01T00:00:02+00:00"
    assert event["data"] == {
        "id": "a1",
        "state": "succeeded",
        "model": "m",
        "num_instances": 3,
        "num_done": 3,
        "num_failed": 0,
        "result": "/jobs/a1/result",
    }


@pytest.mark.parametrize(("status", "is_final"), [(500, False), (302, False), (410, True)])
async def test_another_attempt_follows_an_error(status: int, is_final: bool) -> None:
    async with receiving(status) as receiver:
        hooks, store = Webhooks(["localhost"], SECRET), OneJob(f"http://localhost:{receiver.port}/")
        assert (await tell(hooks, store) is None) == is_final
    assert len(receiver.calls) == 1
    assert hooks.num_calls == {"told": is_final, "failed": not is_final, "given_up": 0}


async def test_attempts_come_to_an_end() -> None:
    store = OneJob("http://localhost:1/", num_attempts=len(webhooks._DELAYS_S))
    hooks = Webhooks(["localhost"], SECRET)
    assert await tell(hooks, store) is None
    assert hooks.num_calls == {"told": 0, "failed": 0, "given_up": 1}


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b/",
        f"http://{'a' * 70}.example/",
        "http://[::1%25a]/",
        "http://xn--a/",
        "http://[v1.a]/",
    ],
)
async def test_a_url_that_cannot_be_called_fails_alone(url: str) -> None:
    hooks, store = Webhooks(["*"], SECRET), OneJob(url)
    hooks.check(url)
    assert await tell(hooks, store) is not None
    assert hooks.num_calls == {"told": 0, "failed": 1, "given_up": 0}


class Unwritable(OneJob):
    """A store that can be read only, such as one that another program has locked."""

    def take_webhooks(
        self, calls: Sequence[WaitingWebhook], lease_s: float, now: float
    ) -> Sequence[DueWebhook]:
        raise UnavailableError("locked", retry_after_s=5)


async def test_a_store_that_cannot_be_written_is_asked_again_after_a_pause() -> None:
    hooks = Webhooks(["localhost"], SECRET)
    with pytest.raises(UnavailableError):
        await hooks._take(Unwritable("http://localhost:1/"))
    assert not hooks._ended.is_set()  # else it would be asked again and again without one
    assert (hooks._places.num, hooks._calls_to) == (0, {})


async def test_a_receiver_cannot_have_anything_kept_for_it_or_others() -> None:
    async with receiving(500, 204) as receiver:
        store = OneJob(f"http://localhost:{receiver.port}/")
        hooks, waiting = Webhooks(["localhost"], SECRET), store.calls
        task = asyncio.create_task(hooks.run(store))
        async with asyncio.timeout(60):
            assert await store.noted.get() is not None
            store.calls = waiting
            assert await store.noted.get() is None
        task.cancel()
    assert ["cookie" in headers for _, headers, _ in receiver.calls] == [False, False]


class Unpostponed(OneJob):
    """A store that goes away during a call."""

    def postpone_webhooks(self, receiver: str, until: float) -> None:
        self._loop.call_soon_threadsafe(self.noted.put_nowait, 0.0)
        raise UnavailableError("gone", retry_after_s=5)


async def test_a_silent_receiver_is_known_even_if_the_store_goes_away() -> None:
    hooks = Webhooks(["localhost"], SECRET)
    assert await tell(hooks, Unpostponed("http://localhost:1/")) == 0.0
    assert list(hooks._silent) == [" it"]


async def test_a_receiver_may_be_silent_for_weeks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(host: str, port: int) -> Sequence[Any]:
        raise OSError("no such host")

    monkeypatch.setattr(webhooks, "_look_up", fail)
    hooks, store = Webhooks(["localhost"], SECRET), OneJob("http://localhost:1/")
    async with httpx.AsyncClient() as client:
        for _ in range(1100):
            assert await hooks._attempt(client, store, store.due)
            hooks._silent[" it"] = (hooks._silent[" it"][0], 0.0)


async def test_a_call_that_fails_unforeseen_ends_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with receiving(204) as receiver:
        url = f"http://localhost:{receiver.port}/"
        store, hooks = OneJob(url), Webhooks(["localhost"], SECRET)
        waiting, look_up = store.calls, webhooks._look_up
        has_failed = asyncio.Event()

        async def fail(host: str, port: int) -> Sequence[Any]:
            has_failed.set()
            monkeypatch.setattr(webhooks, "_look_up", look_up)
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(webhooks, "_look_up", fail)
        telling = asyncio.create_task(tell(hooks, store))
        async with asyncio.timeout(60):
            await has_failed.wait()
            store.calls = waiting
            assert await telling is None


async def test_a_private_address_must_be_named() -> None:
    async with receiving() as receiver:
        store = OneJob(f"http://localhost:{receiver.port}/")
        assert await tell(Webhooks(["*"], SECRET), store) is not None
    assert receiver.calls == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://a.example/", "begins with"),
        ("nonsense", "begins with"),
        ("http://[::1", "begins with"),
        ("http://a.example:99999/", "begins with"),
        ("http://user:pass@a.example/", "password"),
        ("http://a.example/\n", "ASCII"),
        ("http://a.example/" + "x" * 2000, "ASCII"),
        ("http://b.example/", "webhook_hosts"),
        ("http://xa.example/", "webhook_hosts"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        Webhooks(["a.example", "*.c.example"], SECRET).check(url)


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("2002:808:808::", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("::127.0.0.1", False),
        ("fd00::1", False),
        ("ff0e::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
    ],
)
def test_private_addresses_are_known_in_all_forms(address: str, is_allowed: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is is_allowed


def test_allowed_urls_are_taken() -> None:
    hooks = Webhooks(["a.example", "*.c.example"], SECRET)
    for url in ("http://A.example/", "https://a.example:8443/x?y", "http://b.c.example"):
        hooks.check(url)


def test_secrets_are_read() -> None:
    assert read_secret("whsec_" + base64.b64encode(SECRET).decode() + "\n") == SECRET
    assert read_secret("t" * 24) == b"t" * 24
    for text in ("short", "whsec_%%%"):
        with pytest.raises(ValueError, match=r"secret needs|no base64"):
            read_secret(text)
