"""`loaded`: our own lines that the front end and the worker of the echo model have imported.

A real service answers a call. Then each of its processes writes the files of ours that it has
imported, which include those that it imported for the call.
"""

import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.bench.frame import Benchmark, benchmark
from tests.bench.server import ROOT, BenchError, BenchServer, inferpool

_SIGNAL = signal.SIGRTMIN  # which the service does not use
_WAIT_S = 60.0
_HOOK = """
import json, os, signal, sys

def write(*_):
    names = [name for name in [*sys.modules] if name.partition(".")[0] == "inferpool"]
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    with open(f"{folder}/{{os.getpid()}}.part", "w") as part:
        json.dump([each for each in files if each], part)
    os.rename(part.name, f"{folder}/{{os.getpid()}}.json")

signal.signal({number}, write)
"""
"""Python runs it in each process of the service, as `sitecustomize`; it imports nothing of ours."""


@benchmark(
    "our own lines that the front end and the worker of the echo model have imported",
    all=(False, "show each file"),
)
def loaded(bench: Benchmark) -> None:
    """Count the lines in `sys.modules` after one call to the echo model."""
    args = bench.args
    with tempfile.TemporaryDirectory(prefix="loaded-") as name:
        folder = Path(name)
        hook = _HOOK.format(folder=name, number=int(_SIGNAL))
        (folder / "sitecustomize.py").write_text(hook)
        env = {"PYTHONPATH": os.pathsep.join([name, os.environ.get("PYTHONPATH", "")])}
        flags = ["echo", "--replicas", "1", "--front-ends", "1"]
        with BenchServer(inferpool(args, *flags, env=env), args.port, folder / "log") as server:
            server.wait_ready()
            head = {"content-type": "image/jpeg"}
            server.http.post("/predict", content=b"\xff\xd8\xff", headers=head).raise_for_status()
            (worker,) = server.http.get("/health").json()["models"][0]["workers"]
            sides = {"front end": server.pid, "worker": worker["pid"]}
            found = {side: _files_of(pid, folder) for side, pid in sides.items()}
            memory = {side: psutil.Process(pid).memory_full_info() for side, pid in sides.items()}
    for side, files in found.items():
        num, uss = sum(files.values()), memory[side].uss
        bench.content[side] = {"files": files, "lines": num, "uss_bytes": uss}
        rooms: Counter[str] = Counter()
        for path, num_lines in files.items():
            rooms[path if args.all else path.rpartition("/")[0]] += num_lines
        rows = [(room, str(num_lines)) for room, num_lines in rooms.most_common()]
        title = f"{side}: own lines imported: {num}; memory of its own: {uss >> 20} MiB"
        bench.add_table(title, ["file" if args.all else "room", "lines"], rows, "")


def _files_of(pid: int, folder: Path) -> dict[str, int]:
    """Return the files of ours that a process has imported, with their lines."""
    file = folder / f"{pid}.json"
    os.kill(pid, _SIGNAL)
    until = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() > until:
            raise BenchError("a process of the service does not say what it has imported")
        time.sleep(0.01)
    paths = [Path(each) for each in json.loads(file.read_text())]
    own = str(ROOT / "inferpool")
    return {
        os.path.relpath(path, own if str(path).startswith(own) else ROOT): len(
            path.read_text().splitlines()
        )
        for path in paths
    }
