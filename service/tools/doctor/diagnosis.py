"""All the checks, in the order in which their findings are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.settings.settings import Settings
from inferpool.service.tools.doctor.devices import (
    check_driver,
    check_gpus,
    check_placement,
    check_sharing,
    check_visible,
)
from inferpool.service.tools.doctor.facts import Facts, gather
from inferpool.service.tools.doctor.findings import Finding
from inferpool.service.tools.doctor.limits import (
    check_connections,
    check_container,
    check_cores,
    check_descriptors,
    check_processes,
    check_timeouts,
    check_ulimits,
)
from inferpool.service.tools.doctor.memory import (
    check_arena,
    check_fronts,
    check_gpu_memory,
    check_huge_pages,
    check_replicas,
    check_shared_memory,
    check_swap,
)
from inferpool.service.tools.doctor.network import (
    check_address,
    check_keys,
    check_settings_file,
    check_tls,
)
from inferpool.service.tools.doctor.system import (
    check_cache,
    check_compiler,
    check_disk,
    check_kernel,
    check_processor,
    check_temporary,
    check_torch,
)
from inferpool.service.tools.doctor.weights import check_weights
from inferpool.workers.host.devices import Host

if TYPE_CHECKING:
    from inferpool.service.tools.doctor.speeds import Race

Check = Callable[[Facts, Settings], Iterator[Finding]]

FOUND_BY_STARTING: Sequence[Check] = (
    check_placement,
    check_arena,
    check_fronts,
    check_connections,
    check_tls,
    check_cache,
    check_compiler,
)
"""What the start of the service comes upon by itself, and says."""
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
"""Those that cost milliseconds and start no process."""


def diagnose_quickly(settings: Settings, host: Host) -> list[Finding]:
    """What the service looks at when it starts."""
    facts = gather(settings, host)
    return [finding for check in QUICK for finding in check(facts, settings)]


def diagnose(
    settings: Settings, host: Host, origins: Mapping[str, str], race: "Race | None"
) -> Iterator[Finding]:
    """All that `inferpool doctor` looks at; the slow checks come last.

    Args:
        settings: What is to be served.
        host: The devices of this machine.
        origins: Who set what, by dotted key.
        race: Load each model as well, and measure its placements so; None does neither.
    """
    import pynvml

    from inferpool.service.tools.doctor.placement import check_ways
    from inferpool.service.tools.doctor.probes import check_imports, known, measure
    from inferpool.workers.host.nvml import read_nvml

    facts = gather(settings, host)
    yield from check_settings_file(origins)
    yield from check_address(settings, Path("/proc/sys/net/core/somaxconn"))
    nvml = read_nvml(pynvml)
    yield from check_driver(facts, nvml)
    yield from check_gpus(facts, nvml)
    broken = set()
    looked_at = set()
    for check in (*FOUND_BY_STARTING, *QUICK, check_imports):
        for finding in check(facts, settings):
            looked_at.add(finding.check)
            if finding.level == "error":
                broken.add(finding.check)
            yield finding
    names = [
        name
        for name in known(facts, settings)
        if not {f"model {name}", f"weights of {name}"} & broken
        and f"placement of {name}" not in looked_at
    ]
    yield from check_ways(facts, settings, names, race)
    if race:
        yield from measure(facts, settings)
