"""Compiles the simulated accelerator against the installed torch, once for each of its versions.

The result is a folder. In a process that has it on PYTHONPATH, beside the root of the repository,
`import torch` brings the device `sim`, and inferpool knows it as a kind of accelerator.

`python -m tests.simulated_accelerator.build` builds it and prints that folder.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libsim.so"
NAME = "simulated-accelerator"
_SOURCES = Path(__file__).with_name("cpp")
_UNITS = (
    ("operators.cpp", "tensors.cpp", "shapes.cpp", "autocast.cpp"),
    ("controls.cpp",),
    ("devices.cpp", "ledger.cpp", "memory.cpp", "pinned.cpp", "graphs.cpp", "guard.cpp"),
)
"""Files that are compiled at once, since torch's headers take most of the time."""
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-DNDEBUG")
_ENTRY_POINTS = """\
[torch.backends]
sim = tests.simulated_accelerator.torch_sim:autoload

[inferpool.accelerators]
sim = tests.simulated_accelerator.kind:ACCELERATOR
"""
_NUM_KEPT = 20
"""Builds that are kept, so that switching between versions of torch costs nothing."""


class NoCompilerError(Exception):
    """The simulated accelerator cannot be built here."""


def build() -> Path:
    """Return the folder with the simulated accelerator; the first call takes half a minute.

    Raises:
        NoCompilerError: There is none.
        RuntimeError: It cannot be built for this torch.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompilerError("the simulated accelerator needs g++, which is not installed")
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / _key(compiler)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes, one builds
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch, "made")
                made.mkdir()
                _compile(compiler, Path(scratch), made / LIBRARY)
                _describe(made)
                made.rename(folder)
            _forget_old(cache)
        folder.touch()
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which a process, and those that it starts, has the device."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(ROOT), str(folder), *(path for path in inherited if path)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "inferpool-tests", "simulated_accelerator")


def _key(compiler: str) -> str:
    parts = [version("torch"), *_FLAGS, *map(str, _UNITS), _ENTRY_POINTS]
    parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)
    parts += [path.name + path.read_text() for path in sorted(_SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, scratch: Path, library: Path) -> None:
    spec = find_spec("torch")
    assert spec is not None, "inferpool needs torch"
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    flags = (*_FLAGS, f"-I{torch / 'include'}", f"-I{_SOURCES}")
    compilers = []
    for number, unit in enumerate(_UNITS):
        source = scratch / f"{number}.cpp"
        source.write_text("".join(f'#include "{name}"\n' for name in unit))
        compilers.append(_start([compiler, *flags, "-c", source.name], scratch))
    for process in compilers:
        _finish(process)
    objects = [f"{number}.o" for number in range(len(_UNITS))]
    linked = ("-o", str(library), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu")
    _finish(_start([compiler, "-shared", *objects, *linked], scratch))


def _start(command: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _finish(process: "subprocess.Popen[str]") -> None:
    output, _ = process.communicate()
    if process.returncode != 0:
        problem = "\n".join(line for line in output.splitlines() if "error" in line)[:2000]
        raise RuntimeError(f"the simulated accelerator cannot be built for this torch: {problem}")


def _describe(folder: Path) -> None:
    """Write what `importlib.metadata` finds, so that torch and inferpool load it by themselves."""
    info = folder / f"{NAME.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)


def _forget_old(cache: Path) -> None:
    builds = [path for path in cache.iterdir() if (path / LIBRARY).exists()]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in builds[_NUM_KEPT:]:
        shutil.rmtree(old)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except (NoCompilerError, RuntimeError) as error:
        sys.exit(str(error))
