"""The list of checks that the service runs when it starts."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from inferpool.service.checks.devices import (
    check_replicas_on_gpus,
    check_sharing,
    check_visible,
)
from inferpool.service.checks.facts import Facts, gather
from inferpool.service.checks.findings import Finding, warning
from inferpool.service.checks.limits import (
    check_container,
    check_cores,
    check_descriptors,
    check_processes,
    check_timeouts,
    check_ulimits,
)
from inferpool.service.checks.memory import (
    check_gpu_memory,
    check_huge_pages,
    check_replicas,
    check_shared_memory,
    check_swap,
)
from inferpool.service.checks.system import (
    check_disk,
    check_kernel,
    check_processor,
    check_temporary,
    check_torch,
)
from inferpool.service.checks.topology import check_topology
from inferpool.service.checks.weights import check_weights
from inferpool.service.settings.keys import Keys, fingerprint_of
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.devices import Host

Check: TypeAlias = Callable[[Facts, Settings], Iterator[Finding]]


def check_keys(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that no API key allows several kinds of requests."""
    keys_of: Mapping[str, Keys] = {
        "predict_keys": settings.predict_keys,
        "metrics_keys": settings.metrics_keys,
        "admin_keys": settings.admin_keys,
        "cluster_keys": settings.cluster_keys,
    }
    for (name, keys), (other_name, others) in combinations(keys_of.items(), 2):
        if shared := sorted(keys.digests & others.digests):
            which = ", ".join(fingerprint_of(digest) for digest in shared)
            yield warning(
                "API keys",
                f"{name} and {other_name} share a key (SHA-256 {which}...): it allows both",
                "give each a key of its own: `openssl rand -hex 32`",
            )


QUICK: Sequence[Check] = (
    check_keys,
    check_visible,
    check_torch,
    check_weights,
    check_cores,
    check_replicas,
    check_gpu_memory,
    check_sharing,
    check_replicas_on_gpus,
    check_topology,
    check_shared_memory,
    check_descriptors,
    check_processes,
    check_ulimits,
    check_timeouts,
    check_container,
    check_temporary,
    check_disk,
    check_processor,
    check_kernel,
    check_huge_pages,
    check_swap,
)


_OF_WORKERS: Container[Check] = (
    check_visible,
    check_torch,
    check_weights,
    check_cores,
    check_replicas,
    check_gpu_memory,
    check_sharing,
    check_replicas_on_gpus,
    check_topology,
    check_processes,
    check_processor,
)
"""Checks of the host that computes: in a cluster, of the hosts of agents."""


def check_quickly(settings: Settings, host: Host) -> list[Finding]:
    """Run all quick checks that concern this host."""
    facts = gather(settings, host)
    is_cluster = settings.cluster_port is not None
    checks = [check for check in QUICK if not (is_cluster and check in _OF_WORKERS)]
    return [finding for check in checks for finding in check(facts, settings)]
