"""Calls webhooks when jobs are over, in the main process.

The events are CloudEvents 1.0 in the structured JSON mode, signed as Standard Webhooks 1.0.0 say
(github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md). They are sent at least
once: `webhook-id` is the same at each attempt.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from inferpool.service.api.errors import ForbiddenError
from inferpool.service.errors import InvalidInputError, ServiceError
from inferpool.service.parts.jobs.records import DueWebhook, Job, WaitingWebhook
from inferpool.service.parts.jobs.threads import in_thread
from inferpool.service.queue.shares import Shares
from inferpool.workers.shared.backoff import Backoff

if TYPE_CHECKING:
    import httpx

    from inferpool.service.parts.jobs.store.store import JobStore

logger = logging.getLogger(__name__)

_DELAYS_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 36000.0)
"""Time between attempts, about as the specification proposes; then no call is made."""
_ATTEMPT_S = 15.0
_LEASE_S = 60.0
MAX_CALLS = 64
"""Calls at once. One that nobody answers takes a place for `_ATTEMPT_S`."""
_CALLS_TO_ONE = 4
"""Calls at once to one receiver; to one that did not answer last, a single one."""
_LOOKED_AT = 256
_LEAST_PAUSE_S, _MOST_PAUSE_S = 5.0, 300.0
"""A receiver that does not answer is left alone for so long, each time twice as long."""
_MOST_SILENT = 4096
"""Receivers without an answer that are remembered."""
_POLL_S = 2.0
_MOST_URL = 2000
_GONE = 410
"""The receiver wants no more of this (Standard Webhooks, "Considerations")."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses of IPv4 ones, for networks that translate (RFC 6052)."""
_COMPATIBLE = ipaddress.IPv6Network("::/96")
"""The same, out of use (RFC 4291, 2.5.5.1)."""
_SECRET_PREFIX = "whsec_"
_LEAST_SECRET = 24
"""Bytes that the specification asks for at least."""


class Webhooks:
    """Sends one event for each job that is over and asked for it."""

    def __init__(self, hosts: Sequence[str], secret: bytes, share: float = 1.0) -> None:
        """Store the hosts that may be called, and the key of the signatures.

        Args:
            hosts: Names, `*.name` for all below one, or `*`. Only a host that is named in full may
                have a private address.
            secret: The key of the signatures.
            share: The part of what others leave that calls of one owner may have.
        """
        self._hosts = [host.lower() for host in hosts]
        self._secret = secret
        self._places = Shares(MAX_CALLS, share, "calls to webhooks")
        self._calls_to: Counter[str] = Counter()
        """Calls that are made now, by receiver."""
        self._silent: dict[str, tuple[int, float]] = {}
        """Receivers that did not answer last: how many times the pause was doubled, and until when
        they are left alone."""
        self._ended = asyncio.Event()
        """A call is over."""
        self.num_calls = {"told": 0, "failed": 0, "given_up": 0}
        """Calls by outcome; one that failed is tried again later."""

    def check(self, url: str) -> None:
        """Refuse a URL that this service may not call.

        Raises:
            InvalidInputError: It is no URL of a webhook.
            ForbiddenError: Its host is not allowed.
        """
        if len(url) > _MOST_URL or not url.isascii() or not url.isprintable():
            raise InvalidInputError(f"webhook: write a URL of at most {_MOST_URL} ASCII characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = SplitResult("", "", "", "", ""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise InvalidInputError("webhook: write a URL that begins with http:// or https://")
        if parts.username or parts.password:
            raise InvalidInputError("webhook: a URL with a password would show it in logs")
        if not self._is_named(parts.hostname) and not self._is_covered(parts.hostname):
            raise ForbiddenError(
                f"webhook: {parts.hostname[:100]} is not one of the hosts in webhook_hosts"
            )

    async def run(self, store: "JobStore") -> None:
        """Call webhooks until cancelled; without hosts that may be called, there are none."""
        if not self._hosts:
            return
        import httpx  # only a service with webhooks needs it

        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        async with (
            httpx.AsyncClient(timeout=_ATTEMPT_S, trust_env=False, cookies=no_cookies) as client,
            asyncio.TaskGroup() as calls,
        ):
            while True:
                self._ended.clear()
                with contextlib.suppress(ServiceError):
                    for due in await self._take(store):
                        calls.create_task(self._tell(client, store, due), name="tell a webhook")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._ended.wait()

    async def _take(self, store: "JobStore") -> Sequence[DueWebhook]:
        """Pick calls that are due and have a place, and reserve their places."""
        now = time.time()
        busy = [receiver for receiver in self._calls_to if not self._may_call(receiver)]
        chosen: dict[int, WaitingWebhook] = {}
        for call in await in_thread(store.waiting_webhooks, _LOOKED_AT, now, busy):
            if self._may_call(call.receiver) and self._places.may_take(call.owner):
                self._places.take(call.owner)
                self._calls_to[call.receiver] += 1
                chosen[call.number] = call
        try:
            if not chosen:
                return ()
            due = await in_thread(store.take_webhooks, list(chosen.values()), _LEASE_S, now)
            for each in due:
                del chosen[each.call.number]
            return due
        finally:
            for call in chosen.values():
                self._give_back(call)

    def _may_call(self, receiver: str) -> bool:
        return self._calls_to[receiver] < (1 if receiver in self._silent else _CALLS_TO_ONE)

    def _give_back(self, call: WaitingWebhook) -> None:
        self._places.give_back(call.owner)
        self._calls_to[call.receiver] -= 1
        if not self._calls_to[call.receiver]:
            del self._calls_to[call.receiver]

    async def _tell(self, client: "httpx.AsyncClient", store: "JobStore", due: DueWebhook) -> None:
        """Call a webhook, and store the result."""
        try:
            with contextlib.suppress(ServiceError):  # the store is gone: the call is due again
                problem = await self._attempt(client, store, due)
                await in_thread(store.note_webhook, due.call.number, self._next_at(due, problem))
        except Exception:  # it must not end the others; it is due again after its lease
            logger.exception("job %s: its webhook cannot be told", due.job.id)
        finally:
            self._give_back(due.call)
            self._ended.set()

    async def _attempt(
        self, client: "httpx.AsyncClient", store: "JobStore", due: DueWebhook
    ) -> str:
        """Call a webhook, and return why it failed; empty if it did not."""
        job, receiver, began = due.job, due.call.receiver, time.time()
        assert job.webhook is not None
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                problem = await self._post(client, job, job.webhook)
        except (ServiceError, ValueError) as error:  # it may not be called, or is no host
            return str(error) or type(error).__name__
        except (OSError, TimeoutError) as error:
            num, until = self._silent.get(receiver, (0, 0.0))
            if began >= until:  # else another call has found it out, at about the same time
                pause_s = Backoff(_LEAST_PAUSE_S, _MOST_PAUSE_S).pause_s(num)
                until = time.time() + pause_s
                self._note_silent(receiver, num + (pause_s < _MOST_PAUSE_S), until)
                await in_thread(store.postpone_webhooks, receiver, until)
            return str(error) or type(error).__name__
        self._silent.pop(receiver, None)
        return problem

    def _note_silent(self, receiver: str, num: int, until: float) -> None:
        self._silent.pop(receiver, None)  # the one that was noted last comes last
        self._silent[receiver] = num, until
        if len(self._silent) > _MOST_SILENT:
            del self._silent[next(iter(self._silent))]

    def _next_at(self, due: DueWebhook, problem: str) -> float | None:
        """Count a call, and return when to make it again; None: never."""
        job = due.job
        if problem and due.num_attempts < len(_DELAYS_S):
            self.num_calls["failed"] += 1
            delay_s = _DELAYS_S[due.num_attempts] * random.uniform(0.9, 1.1)
            logger.warning(
                "job %s: its webhook was not told, and is tried again in %.0f s: %s",
                job.id,
                delay_s,
                problem,
            )
            return time.time() + delay_s
        if problem:
            self.num_calls["given_up"] += 1
            logger.error("job %s: its webhook was not told: %s", job.id, problem)
        else:
            self.num_calls["told"] += 1
        return None

    async def _post(self, client: "httpx.AsyncClient", job: Job, url: str) -> str:
        """Send the event, and return why it was not taken; empty if it was.

        Raises:
            OSError: Nobody answers.
            ServiceError: It may not be called.
            ValueError: Its host is no name of one.
        """
        import httpx

        self.check(url)
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = await self._address_of(host, port)
        body = event_of(job)
        headers = {
            "host": parts.netloc,
            "content-type": "application/cloudevents+json; charset=utf-8",
            "user-agent": "inferpool",
            **signature_headers(self._secret, f"msg_{job.folder}", int(time.time()), body),
        }
        try:
            # The name is looked up once, above, so that it cannot lead elsewhere after the check.
            target = httpx.URL(url).copy_with(host=address, port=port)
            request = client.build_request(
                "POST", target, content=body, headers=headers, extensions={"sni_hostname": host}
            )
            response = await client.send(request, stream=True)
            await response.aclose()
        except httpx.InvalidURL as error:
            return str(error)
        except httpx.HTTPError as error:
            raise OSError(str(error) or type(error).__name__) from error
        if response.is_success or response.status_code == _GONE:
            return ""
        return f"it answered with {response.status_code}"

    async def _address_of(self, host: str, port: int) -> str:
        """Return an address of a host that may be called.

        Raises:
            OSError: There is none.
            UnicodeError: It is no name of a host, such as `a..b`.
        """
        for _, _, _, _, address in await _look_up(host, port):
            ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
            if self._is_named(host) or is_public(ip):
                return str(ip)
        raise OSError(f"{host} has private addresses only; name it in webhook_hosts to allow that")

    def _is_named(self, host: str) -> bool:
        return host.lower() in self._hosts

    def _is_covered(self, host: str) -> bool:
        name = host.lower()
        return any(
            each == "*" or (each.startswith("*.") and name.endswith(each[1:]))
            for each in self._hosts
        )


async def _look_up(host: str, port: int) -> Sequence[Any]:
    """Return what `socket.getaddrinfo` does, in a thread that nothing else waits for.

    A name server that is silent keeps it for half a minute. The loop has four threads for that.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[Any]] = loop.create_future()

    def look_up() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(
                found.set_result, socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except Exception as error:
            tell = partial(found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(lambda: None if found.done() else tell())

    threading.Thread(target=look_up, name="look up a webhook", daemon=True).start()
    return await found


def is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public, and so is the one that it leads to, if it has one."""
    if isinstance(ip, ipaddress.IPv6Address):
        low = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        leads_to = ip.ipv4_mapped or ip.sixtofour or (low if ip in _TRANSLATED else None)
        if leads_to is not None:
            return is_public(leads_to)
    return ip.is_global and not ip.is_multicast and ip not in _COMPATIBLE


def event_of(job: Job) -> bytes:
    """Return the event that a job is over, as JSON (CloudEvents 1.0, JSON format, 3)."""
    ended_at = datetime.fromtimestamp(job.ended_at or 0.0, UTC).isoformat()
    event = {
        "specversion": "1.0",
        "id": f"msg_{job.folder}",
        "source": f"/jobs/{job.id}",
        "type": f"inferpool.job.{job.state}",
        "time": ended_at,
        "datacontenttype": "application/json",
        "data": {
            "id": job.id,
            "state": job.state,
            "model": job.model,
            "num_instances": job.num_instances,
            "num_done": job.num_done,
            "num_failed": job.num_failed,
            "result": f"/jobs/{job.id}/result",
        },
    }
    return msgspec.json.encode(event)


def signature_headers(secret: bytes, id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that sign an event (Standard Webhooks 1.0.0, "Signature scheme")."""
    signed = b"%b.%d.%b" % (id.encode(), timestamp_s, body)
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def read_secret(text: str) -> bytes:
    """Return the key in a text: `whsec_` and base64, or any other text of 24 bytes and more.

    Raises:
        ValueError: It is too short, or no base64.
    """
    text = text.strip()
    if text.startswith(_SECRET_PREFIX):
        try:
            secret = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
        except binascii.Error as error:
            raise ValueError(f"what follows whsec_ is no base64 ({error})") from None
    else:
        secret = text.encode()
    if len(secret) < _LEAST_SECRET:
        raise ValueError(f"it has {len(secret)} bytes, and a secret needs {_LEAST_SECRET} at least")
    return secret
