"""Throughput and latency of each placement, and of a pipeline beside a process of one stage."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from tests.bench import rounds
from tests.bench.report import table
from tests.bench.rounds import Match
from tests.bench.split_placements import (
    PLACEMENTS,
    STACK,
    WORKLOADS,
    chosen,
    contender,
    options_of,
    stack_bodies,
)


def measure_placements(
    args: argparse.Namespace, plan: rounds.Plan, results: rounds.Results
) -> object:
    """Each workload by each placement, in alternating rounds, against one whole replica."""
    matches = [
        Match(
            workload=name,
            bodies=WORKLOADS[name].bodies(),
            contenders=[
                contender(args, each, WORKLOADS[name].source, settings, options_of(name, args))
                for each, settings in PLACEMENTS.items()
            ],
        )
        for name in chosen(args)
    ]
    return _compare("Each placement under load", "replicate 1", matches, plan, results)


def measure_against_a_stage(
    args: argparse.Namespace, plan: rounds.Plan, results: rounds.Results
) -> object:
    """A pipeline of two equal stages, and a process that computes only one of them.

    The stack's halves are alike, so that either is the heavier one; it is what a pipeline would
    reach if it cost nothing and its stages were always busy.
    """
    half = args.blocks // 2
    match = Match(
        workload="mlp",
        bodies=stack_bodies(),
        contenders=[
            contender(
                args, "pipeline 2", STACK, PLACEMENTS["pipeline 2"], {"num_blocks": 2 * half}
            ),
            contender(
                args,
                "one stage",
                STACK,
                {"replicas": 1, "threads_per_replica": 1},
                {"num_blocks": half},
            ),
        ],
    )
    return _compare("A pipeline beside one of its stages", "one stage", [match], plan, results)


def _compare(
    title: str,
    against: str,
    matches: Sequence[Match],
    plan: rounds.Plan,
    results: rounds.Results,
) -> object:
    found = rounds.run(matches, plan)
    results.failures += found.failures
    results.is_complete = results.is_complete and found.is_complete
    rounds.print_cells(title, found.cells)
    names = dict.fromkeys(cell.contender for cell in found.cells)
    ratios = [
        ratio
        for name in names
        if name != against
        for ratio in rounds.ratios(found.cells, name)
        if ratio.theirs == against
    ]
    rows = [
        (
            ratio.workload,
            str(ratio.connections),
            f"{ratio.ours} / {ratio.theirs}",
            *(
                each.text(2) if each else ""
                for each in (ratio.requests_per_s, ratio.p50_ms, ratio.cpu_s_per_1000)
            ),
        )
        for ratio in ratios
    ]
    columns = ("workload", "conns", "ratio", "requests/s", "p50", "CPU s/1000")
    table(f"{title}: ratios", columns, rows, "Within a round each; medians (range).")
    return {"cells": [asdict(cell) for cell in found.cells], "ratios": [asdict(r) for r in ratios]}
