"""All the checks, in the order in which their findings are read."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pynvml

from inferpool.service.checks.facts import gather
from inferpool.service.checks.findings import Finding
from inferpool.service.checks.quick import QUICK, Check
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.doctor.gpus import check_driver, check_gpus
from inferpool.service.tools.doctor.network import check_address, check_settings_file, check_tls
from inferpool.service.tools.doctor.placement import check_ways
from inferpool.service.tools.doctor.probes import check_imports, known, measure
from inferpool.service.tools.doctor.speeds import Race
from inferpool.service.tools.doctor.starting import (
    check_arena,
    check_cache,
    check_compiler,
    check_connections,
    check_fronts,
    check_placement,
)
from inferpool.workers.host.devices import Host
from inferpool.workers.host.nvml import read_nvml

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


def diagnose(
    settings: Settings, host: Host, origins: Mapping[str, str], race: Race | None
) -> Iterator[Finding]:
    """All that `inferpool doctor` looks at; the slow checks come last.

    Args:
        settings: What is to be served.
        host: The devices of this machine.
        origins: Who set what, by dotted key.
        race: Load each model as well, and measure its placements so; None does neither.
    """
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
