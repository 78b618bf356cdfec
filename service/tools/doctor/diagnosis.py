"""The list of checks that `inferpool doctor` makes, and those that a start makes by itself."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.models.speed_names import COMPILED
from inferpool.service.api.wire.descriptors import max_connections
from inferpool.service.checks.facts import Facts, folder, gather
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.checks.limits import MORE_FILES
from inferpool.service.checks.quick import QUICK, Check
from inferpool.service.client.texts import in_words
from inferpool.service.errors import StartError
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.doctor.gpus import check_driver, check_gpus
from inferpool.service.tools.doctor.network import check_address, check_settings_file, check_tls
from inferpool.service.tools.doctor.placement import check_ways
from inferpool.service.tools.doctor.probes import check_imports, known_models, measure
from inferpool.workers.host.devices import Host
from inferpool.workers.host.nvml import read_nvml
from inferpool.workers.speed.host_side import compiler_name, find_compiler

if TYPE_CHECKING:  # `--measure` alone imports it
    from inferpool.service.tools.tune.race import PlacementRace


def check_placement(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that the devices in the settings exist."""
    for name, reason in facts.misplaced.items():
        yield error(f"devices of {name}", reason, "change devices, or leave it at auto")
    for name, placements in facts.placements.items():
        where = ", ".join(sorted({str(placement) for placement in placements}))
        count = f"{len(placements)} replica{'s' if len(placements) != 1 else ''}"
        first = placements[0]
        if first.split:
            how = "stages" if first.split == "pipeline" else "parts of each matrix"
            count += f", each split into {first.num_ranks} {how},"
        yield ok(f"devices of {name}", f"{count} on {where}")


def check_arena(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that the arena, which the start reserves as a whole, fits into memory."""
    arena, free = settings.arena_bytes, facts.free_bytes
    message = f"{in_words(arena)} of shared memory; {in_words(free)} are free"
    if arena > free:
        yield error(
            "arena",
            message,
            "free some memory, raise the container's limit, or lower arena_bytes",
        )
    else:
        yield ok("arena", message)


def check_fronts(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that each front end has its part of the arena."""
    try:
        num, why = number_of_fronts(settings, facts.host.num_cores, len(facts.host.gpus))
    except StartError as problem:
        yield error("front ends", str(problem), "raise arena_bytes, or lower front_ends")
    else:
        yield ok("front ends", f"{num} ({why})")


def check_connections(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that the connections of the settings fit."""
    wanted = settings.max_connections
    fitting = max_connections(facts.num_files, facts.num_processes + facts.num_decoders)
    if wanted != "auto" and wanted > fitting:
        yield warning("max_connections", f"{wanted} do not fit: {fitting} do", MORE_FILES)


def check_cache(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the folder that keeps the choice of speed presets."""
    path = settings.cache_folder()
    if path is None or all(model.speed == "exact" for model in settings.models.values()):
        return
    nearest = next(p for p in (Path(path), *Path(path).parents) if os.path.lexists(p))
    found = folder(nearest)
    if found is None or not found.is_writable or not nearest.is_dir():
        yield warning(
            "cache folder",
            f"{nearest} is not writable: each start measures speed presets again",
            "set cache_dir to another folder",
        )
    else:
        yield ok("cache folder", path)


def check_compiler(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for the C++ compiler that the compiled presets need."""
    models = settings.models.values()
    is_asked_for = any(model.speed in COMPILED for model in models)
    is_searched = settings.speed_search and any(model.speed == "auto" for model in models)
    if not is_asked_for and not is_searched:
        return
    if compiler := find_compiler():
        yield ok("C++ compiler", compiler)
    elif is_asked_for:
        yield warning(
            "C++ compiler",
            f"there is none ({compiler_name()}): a compiled preset must be in cache_dir already",
            "install g++, or set CXX",
        )
    else:
        yield note(
            "C++ compiler",
            f"there is none ({compiler_name()}): the search leaves out compiled presets",
            "install g++, or set CXX",
        )


FOUND_BY_STARTING: Sequence[Check] = (
    check_placement,
    check_arena,
    check_fronts,
    check_connections,
    check_tls,
    check_cache,
    check_compiler,
)
"""Checks that a start of the service makes by itself."""


def diagnose(
    settings: Settings, host: Host, origins: Mapping[str, str], race: "PlacementRace | None"
) -> Iterator[Finding]:
    """Run all checks of `inferpool doctor`; the slow ones come last.

    Loads models and measures their placements only if there is a `race`.
    """
    facts = gather(settings, host)
    yield from check_settings_file(origins)
    yield from check_address(settings, Path("/proc/sys/net/core/somaxconn"))
    nvml = read_nvml(host.accelerator.library)
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
        for name in known_models(facts, settings)
        if not {f"model {name}", f"weights of {name}"} & broken
        and f"placement of {name}" not in looked_at
    ]
    yield from check_ways(facts, settings, names, race)
    if race:
        yield from measure(facts, settings)
