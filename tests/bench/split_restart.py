"""From the SIGKILL of one process of a worker to the worker being ready again."""

import argparse
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from tests.bench import rounds
from tests.bench.processes import OUT, BenchError, Contender, Probe, Server, ask
from tests.bench.report import Steps, spread, table
from tests.bench.split_placements import PLACEMENTS, WORKLOADS, chosen, contender, options_of

_TIMEOUT_S = 180.0
_POLL_S = 0.005
_HEALTH = Probe(path="/health")


def measure_restarts(
    args: argparse.Namespace, plan: rounds.Plan, results: rounds.Results
) -> object:
    """Kill a rank of each placement, each rank in its turn, and time what follows."""
    seconds: dict[str, dict[str, list[float]]] = {}
    with Steps(len(chosen(args)) * len(PLACEMENTS)) as steps:
        for name in chosen(args):
            workload = WORKLOADS[name]
            seconds[name] = {}
            for place, settings in PLACEMENTS.items():
                steps.begin(f"{name}, {place}: {args.kills} kills")
                options = options_of(name, args)
                server = contender(args, place, workload.source, settings, options)
                try:
                    probe = workload.bodies().probe()
                    seconds[name][place] = _restarts(server, plan.port, probe, args.kills)
                except BenchError as error:
                    results.failures.append(f"{name}, {place}: {error}")
                steps.end()
    rows = [
        (name, place, str(len(taken)), spread(1000 * each for each in taken).text())
        for name, places in seconds.items()
        for place, taken in places.items()
    ]
    columns = ("workload", "placement", "kills", "ms until ready, median (range)")
    caption = "From SIGKILL of one process; as seen over /health every 5 ms."
    table("Restarts", columns, rows, caption)
    return seconds


def _restarts(contender: Contender, port: int, probe: Probe, num_kills: int) -> list[float]:
    taken = []
    with Server(contender, port, OUT / "logs" / "split-restart.log") as server:
        server.wait_ready(probe, _TIMEOUT_S)
        for turn, _ in zip(cycle(range(2)), range(num_kills), strict=False):
            ask(port, probe)  # who has done work is restarted at once
            worker = _workers(server)[0]
            pids = [rank["pid"] for rank in worker["ranks"]] or [worker["pid"]]
            began = time.perf_counter()
            os.kill(pids[turn % len(pids)], signal.SIGKILL)
            _wait_for_next(server, worker["incarnation"])
            taken.append(time.perf_counter() - began)
    return taken


def _wait_for_next(server: Server, incarnation: int) -> None:
    until = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until:
        server.require_running()
        worker = _workers(server)[0]
        if worker["incarnation"] > incarnation and worker["state"] == "ready":
            return
        time.sleep(_POLL_S)
    raise BenchError(f"not ready again in {_TIMEOUT_S:g} s; see {server.log}")


def _workers(server: Server) -> Sequence[Mapping[str, Any]]:
    _, body = ask(server.port, _HEALTH)
    workers: Sequence[Mapping[str, Any]] = json.loads(body)["models"][0]["workers"]
    return workers
