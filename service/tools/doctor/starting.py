"""What the start of the service comes upon by itself, and says."""

import os
from collections.abc import Iterator
from pathlib import Path

from inferpool.models.speed.names import COMPILED
from inferpool.service.api.wire.descriptors import max_connections
from inferpool.service.checks.facts import Facts, folder
from inferpool.service.checks.findings import Finding, error, in_words, note, ok, warning
from inferpool.service.checks.limits import MORE_FILES
from inferpool.service.errors import StartError
from inferpool.service.fronts.number import number_of_fronts
from inferpool.service.settings.settings import Settings
from inferpool.service.speed.search import compiler_name, find_compiler


def check_placement(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Whether the devices asked for are there."""
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
    """The arena is memory of its own, fully reserved at start."""
    arena, free = settings.arena_bytes, facts.free_bytes
    message = f"{in_words(arena)} of shared memory, of {in_words(free)} that can be had"
    if arena > free:
        yield error(
            "arena",
            message,
            "free some memory, raise the container's limit, or lower arena_bytes",
        )
    else:
        yield ok("arena", message)


def check_fronts(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Each front end has its own part of the arena."""
    try:
        num, why = number_of_fronts(settings, facts.host.num_cores)
    except StartError as problem:
        yield error("front ends", str(problem), "raise arena_bytes, or lower front_ends")
    else:
        yield ok("front ends", f"{num} ({why})")


def check_connections(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """What the settings ask for against what fits."""
    wanted = settings.max_connections
    fitting = max_connections(facts.num_files, facts.num_processes)
    if wanted != "auto" and wanted > fitting:
        yield warning("max_connections", f"{wanted} do not fit: {fitting} do", MORE_FILES)


def check_cache(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Where the choice of speed presets is kept."""
    path = settings.cache_folder()
    if path is None or all(model.speed == "exact" for model in settings.models.values()):
        return
    nearest = next(p for p in (Path(path), *Path(path).parents) if os.path.lexists(p))
    found = folder(nearest)
    if found is None or not found.is_writable or not nearest.is_dir():
        yield warning(
            "cache folder",
            f"{nearest} cannot be written: each start measures speed presets anew",
            "set cache_dir to another folder",
        )
    else:
        yield ok("cache folder", path)


def check_compiler(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """What the presets need that are machine code, which are for CPUs."""
    on_cpus = [m for m in settings.models.values() if not facts.host.gpus or m.devices == "cpu"]
    is_asked_for = any(model.speed in COMPILED for model in on_cpus)
    is_searched = settings.speed_search and any(model.speed == "auto" for model in on_cpus)
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
            f"there is none ({compiler_name()}): no compiled preset can be searched for",
            "install g++, or set speed_search = false",
        )
