"""Every wait on a client has an end: a table of waits, tried by raw sockets on each entrance.

A row has what a client sends before it falls silent, and when its connection must have ended. TLS
handshakes are in `test_slow_clients`, answers that nobody reads there and in `test_stopping`.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.e2e.running import Running, running

pytestmark = [pytest.mark.measures, pytest.mark.slow]

KEY = "k" * 40
BODY_GAP_S, HEAD_TIMEOUT_S, KEEP_ALIVE_S = 0.5, 0.5, 9
LINGER_S = 2.0
"""How long a client that was refused in the middle of its body may take to read the answer."""
SLACK_S = 6.0
"""How much later a busy machine may be; less than what `keep_alive_s` adds to the other bounds."""
ENV = {
    "INFERPOOL_BODY_GAP_S": str(BODY_GAP_S),
    "INFERPOOL_HEAD_TIMEOUT_S": str(HEAD_TIMEOUT_S),
    "INFERPOOL_KEEP_ALIVE_S": str(KEEP_ALIVE_S),
    "INFERPOOL_ADMIN_KEYS": f"{KEY}a",
}
KEYS = {"INFERPOOL_PREDICT_KEYS": KEY, "INFERPOOL_METRICS_KEYS": f"{KEY}m"}
SERVICES = [("1", "open"), ("2", "keys")]


@dataclass(frozen=True)
class Wait:
    """One wait on a client."""

    name: str
    sent: bytes
    """What the client sends before it falls silent."""
    bound_s: float
    """Seconds until its connection has ended, give or take the slack."""


@dataclass
class Waited:
    """Results of all waits on one service."""

    ends: dict[str, float] = field(default_factory=dict)
    """Seconds from the last answer to the end of the connection; infinite where none came."""
    answered_s: list[float] = field(default_factory=list)
    """Seconds that calls of other clients took meanwhile."""


def body_waits() -> Iterator[Wait]:
    """Yield half a body on each route, in each form, with and without a key."""
    kinds = (
        *("application/octet-stream", "application/json", "application/safetensors"),
        *("application/x-npy", "multipart/form-data; boundary=b", "image/png"),
    )
    routes = [("POST", "/predict", kind) for kind in kinds]
    routes += [("POST", path, kinds[0]) for path in ("/predict/echo", "/%70redict", "/predict/no")]
    routes += [
        (method, path, kinds[1])
        for method, path in (
            *(("GET", "/predict"), ("OPTIONS", "/predict"), ("GET", "/"), ("GET", "/docs")),
            *(("GET", "/health/live"), ("GET", "/health/ready"), ("GET", "/health")),
            *(("GET", "/metrics"), ("GET", "/events"), ("GET", "/openapi.json"), ("POST", "/no")),
            *(("POST", "/admin/drain"), ("PUT", "/admin/log-level/info"), ("HEAD", "/health")),
        )
    ]
    lengths = {
        "none of a body": b"content-length: 99\r\n\r\n",
        "half a body": b"content-length: 99\r\n\r\nabc",
        "a large body": b"content-length: 99999999999\r\n\r\nabc",
        "half a chunk": b"transfer-encoding: chunked\r\n\r\n9\r\nabc",
        "half the trailers": b"transfer-encoding: chunked\r\n\r\n0\r\na: b\r\n",
    }
    for method, path, kind in routes:
        for what, rest in lengths.items():
            for key in ("", KEY, f"{KEY}a"):
                if key == f"{KEY}a" and not path.startswith("/admin"):
                    continue
                whose = {"": "no key", KEY: "a key"}.get(key, "an admin key")
                line = f"authorization: bearer {key}\r\n" if key else ""
                head = f"{method} {path} HTTP/1.1\r\nhost: h\r\n{line}content-type: {kind}\r\n"
                name = f"{what} of {method} {path} ({kind}) with {whose}"
                yield Wait(name, head.encode() + rest, BODY_GAP_S + LINGER_S)


CALL = b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: h\r\nauthorization: bearer %b\r\n" % KEY.encode()
HALF = POST + b"content-type: application/json\r\ncontent-length: 99\r\n"
HEAD_WAITS = {
    "half a request line": b"GET /hea",
    "half a head": POST,
    "half a head behind an answer": CALL + POST,
}
PIPELINED = {
    "half a body behind an answer": CALL + HALF + b"\r\n[",
    "half a body behind two": CALL + CALL + HALF + b"\r\n[",
    "half a body that waits for 100 Continue": HALF + b"expect: 100-continue\r\n\r\n",
    "half a body of no route behind an answer": CALL + b"POST /no" + HALF[len(b"POST /predict") :],
}
IDLE = {"nothing sent": b"", "idle after an answer": CALL, "idle after two": CALL + CALL}
WAITS = [
    *body_waits(),
    *(Wait(name, sent, HEAD_TIMEOUT_S) for name, sent in HEAD_WAITS.items()),
    *(Wait(name, sent, BODY_GAP_S + LINGER_S) for name, sent in PIPELINED.items()),
    *(Wait(name, sent, KEEP_ALIVE_S) for name, sent in IDLE.items()),
]


async def seconds_until_ended(address: tuple[str, int], wait: Wait) -> float:
    """Send what a row says; return how long after the last answer the connection ends."""
    reader, writer = await asyncio.open_connection(*address)
    began = time.monotonic()
    try:
        async with asyncio.timeout(wait.bound_s + 2 * SLACK_S):
            with contextlib.suppress(ConnectionError):
                writer.write(wait.sent)
                while await reader.read(1 << 16):
                    began = time.monotonic()
        return time.monotonic() - began
    except TimeoutError:
        return float("inf")
    finally:
        writer.close()


async def wait_for_all(service: Running) -> Waited:
    """Have all rows wait at once, and other clients ask meanwhile."""
    found = Waited()

    async def go(wait: Wait) -> None:
        found.ends[wait.name] = await seconds_until_ended(service.address, wait)

    waiting = [asyncio.create_task(go(wait)) for wait in WAITS]
    for _ in range(5):
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(*service.address)
        writer.write(CALL.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        found.answered_s.append(time.monotonic() - began)
        writer.close()
        await asyncio.sleep(0.1)
    await asyncio.gather(*waiting)
    return found


@pytest.fixture(scope="module")
def waited() -> Iterator[dict[tuple[str, str], Waited]]:
    """Results for each service, all tried at once, since waiting costs nothing."""
    with ExitStack() as stack:
        services = []
        for fronts, keys in SERVICES:
            env = {**ENV, **(KEYS if keys == "keys" else {})}
            arguments = ("echo", "--replicas", "1", "--front-ends", fronts)
            services.append(stack.enter_context(running(*arguments, env=env, ready=False)))
        for service in services:
            service.wait_until_ready()

        async def go() -> list[Waited]:
            return await asyncio.gather(*map(wait_for_all, services))

        yield dict(zip(SERVICES, asyncio.run(go()), strict=True))


@pytest.mark.parametrize("service", SERVICES, ids="-".join)
def test_every_wait_on_a_client_ends_by_its_bound(
    waited: dict[tuple[str, str], Waited], service: tuple[str, str]
):
    ends = waited[service].ends
    late = {
        each.name: ends[each.name] for each in WAITS if ends[each.name] > each.bound_s + SLACK_S
    }
    assert late == {}
    assert max(waited[service].answered_s) < SLACK_S


@pytest.mark.parametrize("wait", [each for each in WAITS if each.name in IDLE], ids=str)
def test_idle_connections_stay_open_that_long(waited: dict[tuple[str, str], Waited], wait: Wait):
    assert min(each.ends[wait.name] for each in waited.values()) > KEEP_ALIVE_S - 1.5
