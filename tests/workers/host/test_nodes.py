"""What the kernel and the driver say of the host's memory nodes, from made-up folders."""

from pathlib import Path

import pytest

from inferpool.workers.host.nodes import cpus_in_words, parse_cpus, place_on_bus, read_nodes
from tests.fake_driver.driver import NOT_SUPPORTED, FakeDriver, h100
from tests.fake_sysfs import sysfs_of

BUS_IDS = ("00000000:3B:00.0", "00000000:86:00.0")
LONG_ID = "00010000:86:00.0"
"""Its domain has five digits, as behind a controller of volumes, and its place is the other's."""


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "0-31,64-95", "1,3,5-6", ""])
def test_lists_of_cores_are_read_and_written(text: str):
    assert cpus_in_words(parse_cpus(text + "\n")) == text


def test_nodes_are_read_in_order_with_their_memory(tmp_path: Path):
    nodes = {10: "4-5", 0: "0-1", 2: ""}  # one has memory alone
    found = read_nodes(sysfs_of(tmp_path, nodes))
    assert [(node.number, node.cpus) for node in found] == [(0, (0, 1)), (2, ()), (10, (4, 5))]
    assert found[0].memory_bytes == 8 << 30
    assert read_nodes(tmp_path / "none") == ()


def test_device_whose_node_is_unknown_has_none(tmp_path: Path):
    sys = sysfs_of(tmp_path, {0: "0-3"}, {BUS_IDS[0]: (-1, ""), BUS_IDS[1]: (0, "0-1")})
    assert place_on_bus(BUS_IDS[0], sys) == (None, ())
    assert place_on_bus(BUS_IDS[1], sys) == (0, (0, 1))
    assert place_on_bus(LONG_ID, sys) == (None, ())
    assert place_on_bus("0000001f:00:00.0", sys) == place_on_bus("", sys) == (None, ())


def test_gpus_have_the_node_and_the_cores_of_their_place_on_the_bus(tmp_path: Path):
    sys = sysfs_of(tmp_path, {0: "0-1", 1: "2-3"}, {BUS_IDS[0]: (0, "0-1"), BUS_IDS[1]: (1, "2-3")})
    gpus = {
        "GPU-told": h100(bus_id=BUS_IDS[0], cpus=0b1),
        "GPU-b": h100(bus_id=BUS_IDS[1], nvmlDeviceGetCpuAffinity=NOT_SUPPORTED),
        "GPU-lost": h100(nvmlDeviceGetCpuAffinity=NOT_SUPPORTED),
    }
    host = FakeDriver(tmp_path, gpus).host(FAKE_SYS=str(sys))
    assert [(gpu.node, gpu.cpus) for gpu in host.gpus] == [(0, (0,)), (1, (2, 3)), (None, ())]
    assert [node.cpus for node in host.nodes] == [(0, 1), (2, 3)]
    assert host.nodes_of((1, 2)) == [0, 1]
