"""Checks of the machine: processor, kernel, packages, disk."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from multiprocessing import get_all_start_methods

from inferpool.models.accelerator.kinds import CUDA
from inferpool.service.checks.facts import Build, Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.client.texts import in_words
from inferpool.service.settings.settings import Settings

_MIN_FREE_BYTES = 64 << 20
_MAX_SOCKET_PATH = 107
"""Longest path of a socket: sun_path of sockaddr_un without its NUL (linux/un.h)."""
_SOCKET_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"
"""Path of a multiprocessing socket under the temporary folder."""
_QUICK_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
"""Clocks that need no system call."""
_FEATURES = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "bf16": ("avx512_bf16", "bf16"),
    "AMX": ("amx_tile",),
    "NEON": ("asimd",),
    "SVE": ("sve",),
}


def check_temporary(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the temporary folder, for compilers, models, and the socket between front ends."""
    if facts.tmp is None:
        yield warning(
            "temporary folder",
            "none is writable: torch.compile, model code and a service with several front ends "
            "need one",
            "set TMPDIR, or mount a tmpfs at /tmp",
        )
        return
    path = str(facts.tmp.path)
    if len(path) + len(_SOCKET_NAME) > _MAX_SOCKET_PATH:
        yield warning(
            "temporary folder",
            f"{path} is too long for the socket between several front ends",
            "set TMPDIR to a shorter one",
        )
    elif facts.tmp.free_bytes < _MIN_FREE_BYTES:
        yield warning(
            "temporary folder",
            f"{in_words(facts.tmp.free_bytes)} free in {path}: torch.compile, CUDA's cache and "
            "model code may need more",
            "free some, or set TMPDIR to another folder",
        )
    else:
        yield ok("temporary folder", f"{path}: {in_words(facts.tmp.free_bytes)} free")


def check_torch(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that torch and torchvision fit each other and the GPUs."""
    torch, vision = facts.torch, facts.torchvision
    if torch is None:
        yield error("torch", "is not installed", "pip install torch", is_fatal=True)
        return
    built = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
    yield ok("torch", f"{torch.version}, built {built}")
    if facts.host.gpus and facts.host.accelerator == CUDA and not torch.cuda:
        yield warning(
            "torch",
            "this is a build for CPUs, but this host has a GPU",
            'install a CUDA build of torch, or set devices = "cpu"',
        )
    if vision is None:
        return
    unmet = [each for each in vision.requires if not _is_met(torch.version, each)]
    if unmet:
        yield error(
            "torchvision",
            f"{vision.version} needs torch {', '.join(unmet)}, and {torch.version} is installed",
            "install the pair that was released together",
        )
    elif _variant(torch) != _variant(vision):
        yield error(
            "torchvision",
            f"{vision.version} and torch {torch.version} were built for different devices",
            "install both from the same index",
        )
    else:
        yield ok("torchvision", vision.version)


def check_processor(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for the vector extensions that torch uses."""
    has = [name for name, flags in _FEATURES.items() if facts.cpu_flags.intersection(flags)]
    about = f"{facts.cpu_model or platform.machine()}: {', '.join(has) or 'no vector extensions'}"
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if is_x86 and facts.cpu_flags and "AVX2" not in has:
        yield warning(
            "processor",
            f"{about}; torch is several times slower without AVX2",
            "if this is a virtual machine, pass the host's processor through",
        )
    else:
        yield ok("processor", about)


def check_kernel(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the features of the operating system that make the service faster."""
    missing = {
        "memfd_create (the arena is a deleted file instead)": hasattr(os, "memfd_create"),
        "forkserver (each worker start takes seconds)": "forkserver" in get_all_start_methods(),
        "pidfd": hasattr(os, "pidfd_open"),
    }
    lacks = [name for name, is_there in missing.items() if not is_there]
    system = f"{platform.system()} {platform.release()}, {facts.libc or 'another C library'}"
    if lacks:
        yield note("kernel", f"{system}; without {', '.join(lacks)}", "Linux has them all")
    elif sys.platform == "linux" and not facts.libc.startswith("glibc"):
        yield note(
            "kernel",
            f"{system}: large buffers are mapped anew for every batch",
            "an image with glibc (Debian, Ubuntu) is faster",
        )
    else:
        yield ok("kernel", system)
    if facts.clock and facts.clock not in _QUICK_CLOCKS:
        yield warning(
            "clock",
            f"{facts.clock}: each reading is a system call, and each request needs several",
            "boot with clocksource=tsc if the processor's clock is reliable",
        )
    elif facts.clock:
        yield ok("clock", facts.clock)


def check_disk(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check the free disk space in the working directory."""
    if facts.cwd.is_writable and facts.cwd.free_bytes < _MIN_FREE_BYTES:
        yield warning(
            "disk",
            f"{in_words(facts.cwd.free_bytes)} free in {facts.cwd.path}",
            "free some; the service drops (and counts) log lines that it cannot write",
        )
    else:
        yield ok("disk", f"{in_words(facts.cwd.free_bytes)} free in {facts.cwd.path}")


def _variant(build: Build) -> str:
    """Return the build's label, such as "cu13" for "2.15.0+cu132"; CUDA minor versions mix."""
    label = build.version.partition("+")[2]
    return label[:4] if label.startswith("cu") else label


def _is_met(version: str, wanted: str) -> bool:
    """Return whether a version meets a requirement such as ">=2.14" or "==2.15.0"."""
    for each in wanted.partition(";")[0].split(","):
        found = re.fullmatch(r"(==|>=|<=|>|<|!=|~=)([\d.]+).*", each)
        if found is None:
            continue
        ours, theirs = _numbers(version), _numbers(found[2])
        if found[1] in ("==", "~="):
            theirs = theirs[: len(theirs) - (found[1] == "~=")]
            is_met = ours[: len(theirs)] == theirs
        else:
            compared = {">=": ours >= theirs, "<=": ours <= theirs, ">": ours > theirs}
            compared |= {"<": ours < theirs, "!=": ours != theirs}
            is_met = compared[found[1]]
        if not is_met:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]*\d", version)
    return tuple(map(int, found[0].split("."))) if found else ()
