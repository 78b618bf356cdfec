"""`entries`: our own files that a call enters, in the front end and in the worker, and how often.

A real service answers a few calls, each on a new connection and with another head, like the first
call of a client. Its processes note each function of ours that begins: if its nearest caller among
ours lies in another file, or there is none, the call enters a file. A front end's loop is that of
asyncio, whose callers do not count; that of a worker is ours. On each side the call with the fewest
entries counts, since work beside the calls (looking at the workers, say) adds some now and then.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from tests.bench.frame import Benchmark, benchmark
from tests.bench.server import HOST, ROOT, BenchError, BenchServer, inferpool

_SIGNAL = signal.SIGRTMIN  # which the service does not use
_OWN = str(ROOT / "inferpool") + os.sep
_NUM_CALLS = 12
_WAIT_S = 60.0
_LOOP = "(loop)"
"""Origin of calls that the event loop makes."""
_HOOK = "from tests.bench.entries import listen\nlisten({folder!r})\n"
"""Python runs it in each process of the service, as `sitecustomize`."""
Entry = tuple[str, str]
"""File that a call comes from, and file that it enters."""


@benchmark(
    "our own files that one call enters in the front end and in the worker, and how often",
    front_ends=(1, "processes that take calls"),
    all=(False, "show each way between two files"),
)
def entries(bench: Benchmark) -> None:
    """Count the entries of one call to the echo model."""
    args = bench.args
    with tempfile.TemporaryDirectory(prefix="entries-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_HOOK.format(folder=name))
        env = {"PYTHONPATH": os.pathsep.join([name, str(ROOT), os.environ.get("PYTHONPATH", "")])}
        flags = f"echo --replicas 1 --speed exact --front-ends {args.front_ends}".split()
        with BenchServer(inferpool(args, *flags, env=env), args.port, folder / "log") as server:
            server.wait_ready()
            calls = [_count_call(server, folder, number) for number in range(_NUM_CALLS)]
    for side, of_side in zip(("front end", "worker"), zip(*calls, strict=True), strict=True):
        found = min(of_side, key=len)
        files = Counter(entered for _, entered in found)
        bench.content[side] = {"files": files, "entries": found}
        named = [f"{come} -> {entered}" for come, entered in found] if args.all else files
        rows = [(name, str(num)) for name, num in Counter(named).most_common()]
        title = f"{side}: own files that one call enters: {len(files)}; entries: {len(found)}"
        caption = "A call from one of our files into another is an entry, as is one from the loop."
        bench.add_table(title, ["file", "entries"], rows, caption)


def listen(folder: str) -> None:
    """Note what this process enters from one signal to the next, in a file of the folder."""
    noted: list[Entry] = []
    ground: set[FrameType] = set()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (entered := _own_file(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and (_own_file(caller) is None or caller in ground):
            caller = caller.f_back
        come = _LOOP if caller is None else _own_file(caller)
        if come is not None and come != entered:
            noted.append((come, entered))

    def on_signal(_number: int, frame: FrameType | None) -> None:
        is_begin = sys.getprofile() is None
        sys.setprofile(None)
        part = Path(folder, f"{os.getpid()}.part")
        part.write_text(json.dumps(noted))
        noted.clear()
        part.rename(part.with_suffix(".json"))
        if is_begin:
            below = [each for each, _ in walk_stack(frame)]
            if any("asyncio" in each.f_code.co_filename for each in below):
                ground.update(below)
            sys.setprofile(on_event)

    signal.signal(_SIGNAL, on_signal)


def _own_file(frame: FrameType) -> str | None:
    """Return the file of ours that a function lies in, by its path in the repository."""
    path = frame.f_code.co_filename
    return path[len(str(ROOT)) + 1 :] if path.startswith(_OWN) else None


def _count_call(server: BenchServer, folder: Path, number: int) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of a call in the front end, and in the worker."""
    health = server.http.get("/health").json()
    (worker,) = health["models"][0]["workers"]
    fronts = sorted({server.pid, *(front["pid"] for front in health["fronts"])})
    pids = [*fronts, worker["pid"]]
    with socket.create_connection((HOST, server.port)) as connection:
        head = (
            f"POST /predict HTTP/1.1\r\nHost: host{number}\r\n"
            "Content-Type: image/jpeg\r\nContent-Length: 1024\r\n\r\n"
        )
        time.sleep(0.2)  # the connection is taken
        _signal_all(pids, folder)
        connection.sendall(head.encode() + b"\xff\xd8\xff" + b"x" * 1021)
        answer = connection.recv(65536)
        time.sleep(0.02)  # it is done with the call
        found = _signal_all(pids, folder)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"the call was answered with {answer[:300]!r}")
    *of_fronts, of_worker = found
    return [entry for each in of_fronts for entry in each], of_worker


def _signal_all(pids: Sequence[int], folder: Path) -> list[list[Entry]]:
    """Make each process begin or end its notes; return what all have noted."""
    files = [folder / f"{pid}.json" for pid in pids]
    for pid, file in zip(pids, files, strict=True):
        file.unlink(missing_ok=True)
        os.kill(pid, _SIGNAL)
    until = time.monotonic() + _WAIT_S
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            raise BenchError("a process of the service does not say what it has entered")
        time.sleep(0.001)
    return [[(come, entered) for come, entered in json.loads(file.read_text())] for file in files]
