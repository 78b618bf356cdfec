"""Cores and memory of workers on made-up hosts, as `inferpool doctor` plans and shows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from inferpool.service.checks import topology
from inferpool.service.checks.facts import gather
from inferpool.service.checks.findings import Finding
from inferpool.service.checks.topology import check_topology
from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.nodes import Node, parse_cpus
from inferpool.workers.inside import process
from tests.service.checks.machines import GIB, lines, root_of, settings_of

RESNET = {"model": "torchvision:resnet50"}


def host_of(cpus: str, *node_cpus: str, gpus_on: tuple[int | None, ...] = ()) -> Host:
    """Return a host with these cores, whose nodes have some of them; GPUs are on these nodes."""
    nodes = tuple(
        Node(number=number, cpus=parse_cpus(each), memory_bytes=64 * GIB)
        for number, each in enumerate(node_cpus)
    )
    gpus = tuple(
        Gpu(
            index=index, uuid=f"GPU-{index}", name="H100", memory_bytes=80 * GIB, node=node,
            cpus=() if node is None else nodes[node].cpus,
        )
        for index, node in enumerate(gpus_on)
    )  # fmt: skip
    allowed = parse_cpus(cpus)
    return Host(cpus=allowed, num_cores=len(allowed), gpus=gpus, nodes=nodes)


ONE_NODE = host_of("0-15", "0-15", gpus_on=(0,))
TWO_SOCKETS = host_of("0-127", "0-31,64-95", "32-63,96-127", gpus_on=(0, 0, 0, 0, 1, 1, 1, 1))
"""Each core has two threads."""
UNKNOWN = host_of("0-31", "0-15", "16-31", gpus_on=(None,))
NO_NODES = host_of("0-7", gpus_on=(None,))
HALF_ALLOWED = host_of("0-7", "0-7", "8-15", gpus_on=(0, 1))
"""A cpuset has the cores of one node alone."""


def found_on(host: Host, folder: Path, memory_nodes: str = "0-1", **flags: str) -> list[Finding]:
    settings = settings_of(folder, **{**RESNET, **flags})
    status = root_of(folder) / "proc/self/status"
    status.write_text(f"Name:\tpython\nMems_allowed_list:\t{memory_nodes}\n")
    return list(check_topology(gather(settings, host, folder / "root"), settings))


@pytest.mark.parametrize(
    ("host", "rows"),
    [
        (
            ONE_NODE,
            [
                ("resnet50", "cuda:0", "0", "0-15", "12", "10", "up to 588 MiB"),
                ("front ends", "", "", "4 of any", "", "", ""),
                ("left", "", "", "1 of 16", "", "", ""),
            ],
        ),
        (
            TWO_SOCKETS,
            [
                ("resnet50", f"cuda:{n}", "0", "0-31,64-95", "15", "13", "up to 588 MiB")
                for n in range(4)
            ]
            + [
                ("resnet50", f"cuda:{n}", "1", "32-63,96-127", "15", "13", "up to 588 MiB")
                for n in range(4, 8)
            ]
            + [
                ("front ends", "", "", "8 of any", "", "", ""),
                ("left", "", "", "8 of 128", "", "", ""),
            ],
        ),
        (UNKNOWN, [("resnet50", "cuda:0", "0,1", "any", "28", "26", "up to 588 MiB")]),
        (NO_NODES, [("resnet50", "cuda:0", "unknown", "any", "6", "4", "up to 588 MiB")]),
        (
            HALF_ALLOWED,
            [
                ("resnet50", "cuda:0", "0", "0-7", "3", "0", "up to 588 MiB"),
                ("resnet50", "cuda:1", "0", "any", "3", "0", "up to 588 MiB"),
            ],
        ),
        (host_of("0-7", "0-7"), [("resnet50 x8", "cpu", "0", "any", "1", "0", "")]),
    ],
    ids=["one node", "two sockets", "unknown", "no nodes", "half allowed", "CPUs alone"],
)
def test_table_shows_what_each_worker_has(tmp_path: Path, host: Host, rows: list[tuple[str, ...]]):
    shown = found_on(host, tmp_path)[-1]
    assert shown.level == "ok"
    assert list(shown.rows[1 : len(rows) + 1]) == rows


def test_gpu_whose_cores_are_not_allowed_is_found(tmp_path: Path):
    said = lines(found_on(HALF_ALLOWED, tmp_path, memory_nodes="0"))
    assert "warning cores near cuda:1: this process may use none of 8-15" in said
    assert "warning memory near cuda:1: this process may use none of memory node 1" in said
    assert "near cuda:0" not in said
    assert "near" not in lines(found_on(HALF_ALLOWED, tmp_path, devices="cuda:0")[:-1])


def test_unknown_cores_matter_on_hosts_with_several_nodes_alone(tmp_path: Path):
    assert "note cores near cuda:0: neither the driver" in lines(found_on(UNKNOWN, tmp_path))
    assert len(found_on(NO_NODES, tmp_path)) == 1


def test_workers_that_share_near_cores_share_them_evenly(tmp_path: Path):
    crowded = replace(TWO_SOCKETS, gpus=TWO_SOCKETS.gpus[:2])  # the other socket has none
    (_, *rows) = found_on(crowded, tmp_path)[-1].rows
    assert [row[3:5] for row in rows[:2]] == [("0-31,64-95", "32")] * 2
    assert rows[-1][3] == "62 of 128"


def test_front_ends_keep_the_cores_that_the_settings_give_them(tmp_path: Path):
    (_, worker, fronts, left) = found_on(ONE_NODE, tmp_path, front_ends="6")[-1].rows
    assert (worker[4], fronts[3], left[3]) == ("10", "6 of any", "1 of 16")


def test_batches_that_a_worker_holds_ahead_are_counted():
    assert topology.MORE_AHEAD == process.MORE_AHEAD


def test_cores_that_decoders_lack_are_counted(tmp_path: Path):
    rows = found_on(ONE_NODE, tmp_path, decoders="20")[-1].rows
    assert rows[-1][3] == "9 too few at full load"
