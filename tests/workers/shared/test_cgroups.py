from pathlib import Path

import pytest

from inferpool.workers.shared.cgroups import CgroupLimits, processes_left, read_limits

GIB = 1 << 30


def tree(root: Path, membership: str, files: dict[str, str]) -> CgroupLimits:
    """The limits that a made-up host shows."""
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "membership").write_text(membership)
    return read_limits(root / "cgroup", root / "membership")


def test_version_2_has_the_least_of_all_groups_above(tmp_path: Path):
    limits = tree(
        tmp_path,
        "0::/system.slice/inferpool.service\n",
        {
            "system.slice/memory.max": str(8 * GIB),
            "system.slice/memory.current": str(7 * GIB),
            "system.slice/memory.stat": f"active_file {GIB}\ninactive_file {GIB}",
            "system.slice/inferpool.service/memory.max": str(4 * GIB),
            "system.slice/inferpool.service/memory.current": "0",
            "system.slice/inferpool.service/cpu.max": "150000 100000",
            "system.slice/inferpool.service/pids.max": "100",
            "system.slice/inferpool.service/pids.current": "60",
            "system.slice/pids.max": "max",
        },
    )
    assert limits == CgroupLimits(
        memory_bytes=4 * GIB,
        memory_left_bytes=3 * GIB,
        num_cores=1.5,
        num_pids=100,
        num_pids_left=40,
    )


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path):
    limits = tree(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n0::/\n",
        {
            "memory/docker/abc/memory.limit_in_bytes": str(2 * GIB),
            "memory/docker/abc/memory.usage_in_bytes": str(GIB),
            "memory/docker/abc/memory.stat": f"cache {GIB}\ntotal_inactive_file {GIB // 2}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu/docker/abc/cpu.cfs_quota_us": "50000",
            "cpu/docker/abc/cpu.cfs_period_us": "100000",
            "pids/docker/abc/pids.max": "max",
        },
    )
    assert limits == CgroupLimits(
        memory_bytes=2 * GIB, memory_left_bytes=3 * GIB // 2, num_cores=0.5
    )


def test_container_that_sees_its_own_group_as_the_root_is_limited_by_it(tmp_path: Path):
    files = {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": "0"}
    assert tree(tmp_path, "4:memory:/docker/abc\n", files).memory_bytes == GIB


@pytest.mark.parametrize(
    ("name", "text"),
    [("cpu.max", "max 100000"), ("cpu/cpu.cfs_quota_us", "-1"), ("memory.max", "max"), ("x", "")],
)
def test_missing_limits_are_none(tmp_path: Path, name: str, text: str):
    assert tree(tmp_path, "3:cpu:/\n0::/\n", {name: text}) == CgroupLimits()


def test_limits_of_this_very_process_can_be_read():
    read_limits()


def test_the_least_of_all_limits_of_processes_counts(tmp_path: Path):
    def left(files: dict[str, str]) -> int | None:
        for name, text in {"loadavg": "0.1 0.2 0.3 2/300 999", **files}.items():
            path = tmp_path / "proc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return processes_left(tmp_path / "cgroup", tmp_path / "membership", tmp_path / "proc")

    tree(tmp_path, "0::/a\n", {})
    assert left({"sys/kernel/threads-max": "1000", "sys/kernel/pid_max": "900"}) == 600
    assert left({"sys/kernel/threads-max": "800"}) == 500
    tree(tmp_path, "0::/a\n", {"a/pids.max": "100", "a/pids.current": "60"})
    assert left({}) == 40
