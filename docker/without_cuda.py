"""Lets PyTorch's CUDA build run without GPUs and without most of its CUDA libraries.

For Linux on x86-64, package registries have no other build; its libraries take 4 GB, and a CPU uses
none of them. This script writes a stand-in for each missing library, with the names that PyTorch
links against; every call of one returns an error. The CUDA runtime must be the real one: it finds
that there is no device, and then PyTorch calls none of the others.

Runs once while an image is built, as `python without_cuda.py SITE_PACKAGES`; needs binutils.
"""

import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

_RETURN_1 = {"x86_64": "movl $1, %eax\nret", "aarch64": "mov w0, #1\nret"}
"""Machine code that returns 1, which means an error in each of these interfaces."""
_LIBRARY = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|cufile|cusolver|cusparse|cusparseLt|nccl|nvrtc|nvshmem)"
    r"(_host)?\.so\.\d+"
)
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_UNDEFINED = re.compile(r" UND (\w+)(?:@([\w.]+))?")


def main(site_packages: Path) -> None:
    """Write a stand-in for each missing library beside PyTorch's own, where it looks first."""
    folder = site_packages / "torch" / "lib"
    own = list(folder.glob("*.so*"))
    needed = {name for path in own for name in _NEEDED.findall(_readelf("--dynamic", path))}
    there = {path.name for path in [*own, *site_packages.glob("nvidia/**/*.so*")]}
    wanted = _undefined(own)
    for library in sorted(needed - there):
        if match := _LIBRARY.fullmatch(library):
            begin = match[1].lower()  # ncclSend is in libnccl, cuFileRead in libcufile, and so on
            names = {name: v for name, v in wanted.items() if name.lower().startswith(begin)}
            _write(folder / library, names)
            sys.stdout.write(f"{library}: {len(names)} names that answer with an error\n")


def _undefined(libraries: Iterable[Path]) -> dict[str, str]:
    """Return the names that libraries look for in others, each with the version it must have."""
    return {
        name: version
        for path in libraries
        for name, version in _UNDEFINED.findall(_readelf("--dyn-syms", path))
    }


def _readelf(what: str, path: Path) -> str:
    done = subprocess.run(
        ["readelf", "--wide", what, path], capture_output=True, check=True, text=True
    )
    return done.stdout


def _write(library: Path, versions_by_name: Mapping[str, str]) -> None:
    """Make a library of functions that fail."""
    names_by_version = defaultdict(list)
    for name, version in versions_by_name.items():
        names_by_version[version].append(name)
    labels = "\n".join(f".globl {n}\n.type {n}, %function\n{n}:" for n in versions_by_name)
    script = "\n".join(
        f"{version} {{ global: {'; '.join(names)}; }};"
        for version, names in names_by_version.items()
        if version
    )
    with TemporaryDirectory() as scratch:
        code, exports, objects = (Path(scratch, name) for name in ("code.s", "exports", "code.o"))
        code.write_text(f".text\n{labels}\n{_RETURN_1[platform.machine()]}\n")
        exports.write_text(script)
        subprocess.run(["as", "-o", objects, code], check=True)
        options: list[str | Path] = ["-shared", "-z", "noexecstack", "-soname", library.name]
        if script:
            options += ["--version-script", exports]
        subprocess.run(["ld", *options, "-o", library, objects], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
