"""Tells webhooks that jobs are over, in the main process.

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
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec

from inferpool.service.api.errors import ForbiddenError
from inferpool.service.errors import InvalidInputError, ServiceError
from inferpool.service.jobs.records import DueWebhook, Job
from inferpool.service.jobs.threads import in_thread

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_DELAYS_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 36000.0)
"""Time between attempts, about as the specification proposes; then nobody is told."""
_ATTEMPT_S = 15.0
_LEASE_S = 60.0
_AT_ONCE = 8
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


class WebhookStore(Protocol):
    """The store, as far as webhooks need it."""

    def due_webhooks(self, limit: int, lease_s: float, now: float) -> Sequence[DueWebhook]:
        """Take jobs whose webhook must be told now."""

    def note_webhook(self, id: str, next_at: float | None) -> None:
        """Keep when a webhook is tried next; None: never again."""


class Webhooks:
    """Sends one event for each job that is over and asked for it."""

    def __init__(self, hosts: Sequence[str], secret: bytes) -> None:
        """Take the hosts that may be told, and the key of the signatures.

        Args:
            hosts: Names, `*.name` for all below one, or `*`. Only a host that is named in full may
                have a private address.
            secret: The key of the signatures.
        """
        self._hosts = [host.lower() for host in hosts]
        self._secret = secret
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

    async def run(self, store: WebhookStore) -> None:
        """Tell webhooks until cancelled; without hosts that may be told, there are none."""
        if not self._hosts:
            return
        import httpx  # only a service with webhooks needs it

        async with httpx.AsyncClient(timeout=_ATTEMPT_S, trust_env=False) as client:
            while True:
                due: Sequence[DueWebhook] = ()
                with contextlib.suppress(ServiceError):
                    due = await in_thread(store.due_webhooks, _AT_ONCE, _LEASE_S, time.time())
                    await asyncio.gather(*(self._tell(client, store, each) for each in due))
                if not due:
                    await asyncio.sleep(_POLL_S)

    async def _tell(
        self, client: "httpx.AsyncClient", store: WebhookStore, due: DueWebhook
    ) -> None:
        job, next_at = due.job, None
        assert job.webhook is not None
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                problem = await self._post(client, job, job.webhook)
        except (OSError, TimeoutError, ServiceError, ValueError) as error:
            problem = str(error) or type(error).__name__
        if problem and due.num_attempts < len(_DELAYS_S):
            self.num_calls["failed"] += 1
            delay_s = _DELAYS_S[due.num_attempts] * random.uniform(0.9, 1.1)
            next_at = time.time() + delay_s
            logger.warning(
                "job %s: its webhook was not told, and is tried again in %.0f s: %s",
                job.id,
                delay_s,
                problem,
            )
        elif problem:
            self.num_calls["given_up"] += 1
            logger.error("job %s: its webhook was not told: %s", job.id, problem)
        else:
            self.num_calls["told"] += 1
        await in_thread(store.note_webhook, job.id, next_at)

    async def _post(self, client: "httpx.AsyncClient", job: Job, url: str) -> str:
        """Send the event, and return why that failed; empty if it did not."""
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
            **signature_headers(self._secret, f"msg_{job.id}", int(time.time()), body),
        }
        try:
            # The name is looked up once, above, so that it cannot lead elsewhere after the check.
            target = httpx.URL(url).copy_with(host=address, port=port)
            request = client.build_request(
                "POST", target, content=body, headers=headers, extensions={"sni_hostname": host}
            )
            response = await client.send(request, stream=True)
            await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return str(error) or type(error).__name__
        if response.is_success or response.status_code == _GONE:
            return ""
        return f"it answered with {response.status_code}"

    async def _address_of(self, host: str, port: int) -> str:
        """Return an address of a host that may be called.

        Raises:
            OSError: There is none.
            UnicodeError: It is no name of a host, such as `a..b`.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for _, _, _, _, address in found:
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
        "id": f"msg_{job.id}",
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
