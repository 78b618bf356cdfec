"""The cluster of one front end: an engine over the hosts that have joined with their agents.

Runs in the front end's event loop.
"""

import os
import platform
import socket
from collections.abc import Callable

from inferpool.service.catalog.catalog import Catalog
from inferpool.service.parts.cluster.door import ClusterDoor
from inferpool.service.parts.cluster.shown import ShownHosts
from inferpool.service.settings.address import address_of
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.devices import Host
from inferpool.workers.host.engine import WorkerHandle, WorkerId
from inferpool.workers.remote.host import RemoteHost
from inferpool.workers.remote.hosts import RemoteHosts
from inferpool.workers.remote.joining import Dialer, make_instance
from inferpool.workers.remote.standby import Standby
from inferpool.workers.remote.wire import HostFacts
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.config import WorkerConfig


class Cluster:
    """Starts workers on hosts that join, and adds and removes these hosts in the catalog."""

    def __init__(
        self,
        settings: Settings,
        door: ClusterDoor,
        arena: Arena,
        catalog: Catalog,
        shown: ShownHosts,
    ) -> None:
        """Store the parts; no agent joins before `open`.

        Args:
            settings: The settings, with a cluster port and keys.
            door: The port.
            arena: Holds the payloads.
            catalog: Has all versions, which get workers on each host.
            shown: Shows the hosts.
        """
        keys = sorted(settings.cluster_keys.digests)
        self._catalog = catalog
        self._shown = shown
        self._hosts = RemoteHosts(arena, door.listener, keys, door.tls, version_of(), self)
        shown.address = door.address
        shown.standby = lambda: self._hosts.standby_reason
        self._standby: Standby | None = None
        if settings.standby_of is not None:
            dialer = Dialer(
                keys[0], door.dialing_tls, _own_facts(), insecure=settings.cluster_insecure
            )
            self._standby = Standby(self._hosts, address_of(settings.standby_of), dialer)

    def open(self) -> None:
        """Allow agents to join. The catalog must have been started."""
        self._hosts.open()
        if self._standby is not None:
            self._standby.start()

    async def start(
        self, id: WorkerId, config: WorkerConfig, on_progress: Callable[[str], None]
    ) -> WorkerHandle:
        """Start a worker on the host in its id."""
        return await self._hosts.start(id, config, on_progress)

    def forkserver_vitals(self) -> None:
        """Return None: nothing is forked on this host."""

    async def close(self) -> None:
        """Leave all hosts. Their agents keep what is loaded for the front end that comes next."""
        if self._standby is not None:
            await self._standby.stop()
        await self._hosts.close()

    def on_joined(self, host: RemoteHost) -> None:
        """Start workers on a host that has joined."""
        self._shown.on_joined(host)
        self._catalog.add_host(host.name, host.facts.devices)

    def on_lost(self, host: RemoteHost, reason: str) -> None:
        """Remove the workers of a host that was lost."""
        self._shown.on_lost(host, reason)
        self._catalog.remove_host(host.name, f"its host {host.name} was lost: {reason}")


def _own_facts() -> HostFacts:
    """Return the facts about this front end for the other one."""
    return HostFacts(
        name=socket.gethostname(),
        instance=make_instance(),
        pid=os.getpid(),
        version=version_of(),
        torch="",
        python=platform.python_version(),
        devices=Host(cpus=(), num_cores=0),
    )
