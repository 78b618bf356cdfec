"""Finds where the ranks of a spread replica meet. Runs in the agent of each of its hosts."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address

import psutil

from inferpool.workers.shared.config import WorkerConfig
from inferpool.workers.shared.errors import WorkerStartError


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlace:
    """A network interface of this host, and one of its addresses."""

    interface: str
    address: str


def place_called(interface: str) -> NetworkPlace:
    """Return the place of a network interface of this host.

    Raises:
        ValueError: It has no such interface, or this one has no IP address.
    """
    addresses = _addresses()
    if interface not in addresses:
        have = ", ".join(sorted(addresses))
        raise ValueError(f"there is no network interface {interface} with an address: {have}")
    return NetworkPlace(interface=interface, address=addresses[interface][0])


def place_with(address: str) -> NetworkPlace:
    """Return the place of an address of this host.

    Raises:
        ValueError: No interface has it.
    """
    for interface, addresses in _addresses().items():
        if address in addresses:
            return NetworkPlace(interface=interface, address=address)
    raise ValueError(f"no network interface has the address {address}: name one (--interface)")


@contextlib.contextmanager
def located(
    config: WorkerConfig,
    interface: str,
    address: str,
    tell: Callable[[str, int], None],
) -> Iterator[WorkerConfig]:
    """Add to a configuration where this host is; on rank 0's host, open the place of the meeting.

    Args:
        config: Configuration of a worker; one that is not spread stays as it is.
        interface: Interface for the ranks; empty takes the one of `address`.
        address: Address of this host on the way to the front end.
        tell: Called with the address and port of the meeting, on rank 0's host.

    Yields:
        The configuration. Leave the context once the ranks run.

    Raises:
        WorkerStartError: There is no such interface, or others cannot reach this host.
    """
    part = config.part
    if part is None:
        yield config
        return
    try:
        place = place_called(interface) if interface else place_with(address)
    except ValueError as error:
        raise WorkerStartError(str(error), permanent=False) from error
    part = replace(part, own_address=place.address, interface=place.interface)
    if part.first:
        _require_reach(part.address, place)
        yield replace(config, part=part)
        return
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    try:
        door = socket.create_server((place.address, 0), family=family)
    except OSError as error:
        text = f"nothing can listen at {place.address}: {error.strerror}"
        raise WorkerStartError(text, permanent=False) from error
    with door:
        port = door.getsockname()[1]
        tell(place.address, port)
        yield replace(
            config, part=replace(part, address=place.address, port=port, door=door.fileno())
        )


def _require_reach(meeting: str, place: NetworkPlace) -> None:
    """Check that two hosts do not mean themselves by a loopback address.

    Raises:
        WorkerStartError: One of them does.
    """
    if ip_address(meeting).is_loopback != ip_address(place.address).is_loopback:
        raise WorkerStartError(
            f"ranks at {place.address} and at {meeting} cannot reach each other: let all agents "
            "join by an address of the network between the hosts, or name its interface "
            "(--interface)",
            permanent=False,
        )


def _addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each interface, those of version 4 first."""
    found: dict[str, list[str]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if entry.family == family and "%" not in entry.address:  # no link-local ones
                    found.setdefault(interface, []).append(entry.address)
    return found
