"""Checks of a running cluster, which ask its front end over HTTP."""

import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import quote

import httpx
import msgspec

from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.client.cli.flags import METRICS_KEY_VARIABLE
from inferpool.service.client.connecting import STRAIGHT, open_client
from inferpool.service.client.health import KnownHost, LostHost, ServiceHealth
from inferpool.service.client.reaching import problem_in, why_unreached
from inferpool.service.client.urls import without_password

_TIMEOUT_S = 150.0
"""Longest time of a measurement, which the front end limits itself."""
_CONNECT_S = 5.0
_REACH_S = 3.0
IMAGE_BYTES = 100 << 10
"""Assumed size of images."""
_FAR_S = 0.01
"""Least round trip of a host that is far away."""
_OFF_S, _FAR_OFF_S = 0.1, 1.0
"""Least differences of clocks for a note and for a warning."""
_SLOW_BYTES_PER_S = 100e6
"""Bandwidth below that of a gigabit a second."""
_HEAD = ("host", "version", "torch", "Python", "clock", "round trip", "to it", "from it", "devices")


class ClusterError(Exception):
    """The front end gives no proper answer; the message says why."""


class MeasuredHost(msgspec.Struct, frozen=True):
    """Bandwidth between the front end and a host."""

    to_bytes_per_s: float
    from_bytes_per_s: float

    @property
    def images_per_s(self) -> float:
        """Images per second that reach the host; answers are smaller, and go the other way."""
        return self.to_bytes_per_s / IMAGE_BYTES


class ClusterConnection:
    """Connection to the front end of a cluster."""

    def __init__(
        self,
        url: str,
        context: ssl.SSLContext,
        *,
        key: str = "",
        admin_key: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Store how to connect.

        Args:
            url: Address of the service.
            context: TLS.
            key: Key for /health; empty for none.
            admin_key: Key for administration; empty for none.
            transport: Replacement of the network.
        """
        self.place = without_password(url)
        self.host = httpx.URL(url).host
        self.has_admin_key = bool(admin_key)
        self._url = url
        self._key = key or admin_key
        self._admin_key = admin_key
        self._http = open_client(
            STRAIGHT,
            verify=context,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
            transport=transport,
        )

    def health(self) -> ServiceHealth:
        """Return the state of the front end and the hosts.

        Raises:
            ClusterError: It gives no proper answer.
        """
        answer = self._ask("GET", "/health", self._key)
        if answer.status_code in (401, 403):
            raise ClusterError(
                f"{self.place} wants a key for metrics: the first of {METRICS_KEY_VARIABLE} is sent"
            )
        try:
            return msgspec.json.decode(answer.content, type=ServiceHealth)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise ClusterError(f"the server at {self.place} is no inferpool") from problem

    def measure(self, host: str) -> MeasuredHost:
        """Return the front end's measurement of its connection to a host.

        Raises:
            ClusterError: It does not measure, or does not answer.
        """
        answer = self._ask("POST", f"/admin/hosts/{quote(host, safe='')}/measure", self._admin_key)
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=MeasuredHost)
        problem = problem_in(answer.content)
        raise ClusterError(problem.get("detail", f"it answers {answer.status_code}"))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(self, method: str, path: str, key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return self._http.request(method, self._url + path, headers=headers)
        except httpx.TransportError as problem:
            text = why_unreached(problem, self._url, command="inferpool doctor", flag="--cluster")
            raise ClusterError(text) from problem


def check_cluster(connection: ClusterConnection) -> Iterator[Finding]:
    """Run all checks of a cluster; those that send much come last."""
    try:
        health = connection.health()
    except ClusterError as problem:
        yield error("front end", str(problem), "name the address of a running service and its key")
        return
    if health.cluster_address is None:
        yield error(
            "front end",
            f"{connection.place} computes on its own host, so no agent can join it",
            "start it with --cluster-port N and a key in INFERPOOL_CLUSTER_KEYS",
        )
        return
    state = f"{connection.place} is {health.status}, and agents join at {health.cluster_address}"
    yield ok("front end", state)
    yield from _check_port(connection.host, health.cluster_address)
    if health.standby:
        yield note("standby", health.standby, "ask the other front end for its hosts")
        return
    yield from map(_check_lost, health.lost_hosts)
    if not health.hosts:
        yield error(
            "hosts",
            "none is connected",
            f"start `inferpool agent --join {health.cluster_address}` on each, and read its log",
        )
        return
    for host in health.hosts:
        yield from _check_host(host)
    yield from _check_versions(health)
    measured, findings = _measure(connection, health)
    yield _overview(health, measured)
    yield from findings


def _check_port(front_end: str, address: str) -> Iterator[Finding]:
    """Check that the cluster port can be reached from here, where an agent may be started."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    ip = ip_address(host)
    target = front_end if ip.is_unspecified else host
    try:
        socket.create_connection((target, int(port)), timeout=_REACH_S).close()
    except OSError as problem:
        yield warning(
            "cluster port",
            f"{target}:{port} cannot be reached from here ({problem.strerror or problem})",
            f"if hosts cannot reach it either, open TCP port {port} in the firewalls between",
        )
        return
    if ip.is_loopback:
        yield note(
            "cluster port",
            f"only agents on the front end's own machine can join at {address}",
            "set cluster_host to an address that the hosts reach",
        )
    else:
        yield ok("cluster port", f"{target}:{port} can be reached from here")


def _check_lost(host: LostHost) -> Finding:
    text = f"{host.state} {host.age_s:.0f} s ago: {host.reason}"
    if host.state == "left":
        return note(f"host {host.name}", text)
    cure = "look at that machine, its network and the log of its agent, which dials by itself"
    return warning(f"host {host.name}", text, cure)


def _check_host(host: KnownHost) -> Iterator[Finding]:
    check = f"host {host.name}"
    if host.state != "connected":
        yield error(
            check,
            f"no sign of life for {host.last_beat_age_s:.1f} s",
            "look at that machine and its network",
        )
    if host.workers_ready < host.workers:
        yield warning(
            check,
            f"{host.workers_ready} of {host.workers} workers are ready",
            "/health has the reason of each worker; it is normal while models load",
        )
    for gpu in host.gpus:
        if not gpu.up:
            yield error(
                check, f"GPU {gpu.index} is lost", "see what `nvidia-smi` says on that host"
            )
    offset_s = host.clock_offset_s or 0.0
    if abs(offset_s) >= _OFF_S:
        way = "ahead of" if offset_s > 0 else "behind"
        tell = warning if abs(offset_s) >= _FAR_OFF_S else note
        yield tell(
            check,
            f"its clock is {abs(offset_s):.1f} s {way} the front end's, so logs cannot be compared",
            "run an NTP client, such as chrony, on both; deadlines do not depend on it",
        )
    if (host.round_trip_s or 0.0) >= _FAR_S:
        yield warning(
            check,
            f"a round trip takes {_in_ms(host.round_trip_s)}, by which each answer is later",
            "use hosts that are near the front end, or a front end near the hosts",
        )


def _check_versions(health: ServiceHealth) -> Iterator[Finding]:
    """Compare the versions of all hosts with the front end's."""
    others = []
    for host in health.hosts:
        for what, theirs, ours in (
            ("inferpool", host.version, health.version),
            ("torch", host.torch, health.torch),
            ("Python", host.python, health.python),
        ):
            if theirs and ours and theirs != ours:
                others.append(f"{host.name} has {what} {theirs}")
    ours = f"inferpool {health.version}, torch {health.torch}, Python {health.python}"
    if others:
        yield warning(
            "versions",
            f"the front end has {ours}; {', '.join(others)}",
            "install the same versions on all hosts, or the same model may answer otherwise",
        )
    else:
        yield ok("versions", f"all have {ours}")


def _measure(
    connection: ClusterConnection, health: ServiceHealth
) -> tuple[Mapping[str, MeasuredHost], list[Finding]]:
    """Measure the connection to each host, one after the other."""
    if not connection.has_admin_key:
        text = "not measured: only an administrator may ask for it"
        cure = "--key-file with a key for administration, or the variable INFERPOOL_ADMIN_KEYS"
        return {}, [note("bandwidth", text, cure)]
    measured: dict[str, MeasuredHost] = {}
    findings = []
    for host in health.hosts:
        check = f"bandwidth of {host.name}"
        try:
            speed = measured[host.name] = connection.measure(host.name)
        except ClusterError as problem:
            cure = "give a key for administration, and see that the host stays connected"
            findings.append(warning(check, f"not measured: {problem}", cure))
            continue
        text = (
            f"{_in_mb(speed.to_bytes_per_s)} to it, {_in_mb(speed.from_bytes_per_s)} from it: "
            f"{speed.images_per_s:,.0f} images/s of 100 KiB"
        )
        if min(speed.to_bytes_per_s, speed.from_bytes_per_s) >= _SLOW_BYTES_PER_S:
            findings.append(ok(check, f"{text} at most"))
        else:
            cure = "use a network of 1 Gbit/s or more, or send smaller inputs"
            findings.append(warning(check, f"only {text}", cure))
    return measured, findings


def _overview(health: ServiceHealth, measured: Mapping[str, MeasuredHost]) -> Finding:
    rows: list[tuple[str, ...]] = [_HEAD]
    for host in health.hosts:
        speed = measured.get(host.name)
        offset = "" if host.clock_offset_s is None else f"{host.clock_offset_s:+.3f} s"
        ways = () if speed is None else (speed.to_bytes_per_s, speed.from_bytes_per_s)
        rows.append(
            (
                host.name,
                host.version,
                host.torch,
                host.python,
                offset,
                _in_ms(host.round_trip_s),
                *([_in_mb(way) for way in ways] or ("-", "-")),
                ", ".join(host.devices),
            )
        )
    num_ready = sum(host.workers_ready for host in health.hosts)
    text = f"{len(health.hosts)} connected, with {num_ready} workers that are ready"
    return replace(ok("hosts", text), rows=tuple(rows))


def _in_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f} ms"


def _in_mb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
