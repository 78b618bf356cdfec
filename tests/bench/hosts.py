"""`hosts`: workers under an agent beside workers of the front end, and what a batch's way costs.

The agent runs on the same cores, so the loopback interface stands for the network. The way of a
batch alone is measured between two processes that do nothing else, in clear text and over TLS.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.bench.frame import Benchmark, Cell, Turn, benchmark, chosen
from tests.bench.peers import RATIOS
from tests.bench.server import HOST, ServerCommand, inferpool
from tests.bench.way import ITEM_BYTES, NUM_ITEMS, go_the_way
from tests.bench.workloads import WORKLOADS, Workload


@benchmark(
    "workers under an agent beside the front end's own, and what a batch's way costs",
    rounds=3,
    secs=5,
    warm=2,
    connections=(16, 64),
    serve_args="",
    workloads=("echo-1k,jpeg-mobilenet", "comma-separated; see `peers`"),
    batches=(1000, "batches of 8 x 100 KiB in each turn of the way alone"),
)
def hosts(bench: Benchmark) -> None:
    """Let the front end alone, the one with an agent, and the ways take turns."""
    turns: dict[str, Turn] = {
        way: partial(_go, way, bench.args.batches) for way in ("clear", "tls")
    }
    for name, work in chosen(bench.args.workloads, WORKLOADS, "workload").items():
        local = inferpool(bench.args, *work.serve(), name="local")
        for command in (local, _with_agent(bench, work)):
            turns[f"{name}, {command.name}"] = bench.closed_turn(name, work.bodies(), command)
    bench.take_turns(turns)
    way = f"The way: a batch of {NUM_ITEMS} x {ITEM_BYTES >> 10} KiB to a process and its answer."
    bench.report("connections", way)
    bench.report_ratios("connections", RATIOS, lambda name: name == "local")


def _with_agent(bench: Benchmark, work: Workload) -> ServerCommand:
    port = f"{bench.args.port + 1}"
    key = {"INFERPOOL_CLUSTER_KEYS": "a-key-for-the-benchmark-alone"}
    command = inferpool(bench.args, *work.serve(), "--cluster-port", port, name="agent", env=key)
    agent = f"agent --join {HOST}:{port} --name bench --log-format json"
    return replace(command, beside=shlex.split(f"{bench.args.inferpool} {agent}"))


def _go(name: str, num: int, _: int) -> Iterator[Cell]:
    yield Cell("way", name, 0, go_the_way(name, num))
