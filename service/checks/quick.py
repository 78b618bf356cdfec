"""The checks that the service makes when it starts, in the order in which they are read."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from inferpool.service.checks.access import check_keys
from inferpool.service.checks.devices import check_sharing, check_visible
from inferpool.service.checks.facts import Facts, gather
from inferpool.service.checks.findings import Finding
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
from inferpool.service.checks.weights import check_weights
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.devices import Host

Check: TypeAlias = Callable[[Facts, Settings], Iterator[Finding]]

QUICK: Sequence[Check] = (
    check_keys,
    check_visible,
    check_torch,
    check_weights,
    check_cores,
    check_replicas,
    check_gpu_memory,
    check_sharing,
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


def check_quickly(settings: Settings, host: Host) -> list[Finding]:
    """Make them."""
    facts = gather(settings, host)
    return [finding for check in QUICK for finding in check(facts, settings)]
