import signal
from pathlib import Path

import pytest

from inferpool.workers.host.observed import OomKills, describe_exit


@pytest.fixture
def host(tmp_path: Path):
    """A fake tree: where groups are mounted, what this process's are, and the host's own count."""

    def host(membership: str, **files: str) -> OomKills:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return OomKills(tmp_path / "mount", tmp_path / "membership", tmp_path / "vmstat")

    return host


EVENTS = "low 0\nhigh 9\nmax 7\noom 3\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def test_kills_of_our_own_group_are_counted_in_version_2(host, tmp_path: Path):
    kills = host(
        "0::/service/ours\n",
        mount__service__ours__memoryDOTevents=EVENTS.format(2),
        mount__service__memoryDOTevents=EVENTS.format(40),
        vmstat="nr_free_pages 1\noom_kill 77\n",
    )
    assert kills.count() == 2
    (tmp_path / "mount/service/ours/memory.events").write_text(EVENTS.format(3))
    assert kills.count() == 3


def test_kills_of_our_own_group_are_counted_in_version_1(host):
    kills = host(
        "9:name=systemd:/\n4:cpu,memory:/ours\n0::/\n",
        mount__memory__ours__memoryDOToom_control=CONTROL.format(5),
        mount__memory__memoryDOToom_control=CONTROL.format(50),
    )
    assert kills.count() == 5


def test_group_that_is_mounted_as_the_root_in_a_container_is_found(host):
    kills = host("0::/docker/abc\n", mount__memoryDOTevents=EVENTS.format(1))
    assert kills.count() == 1


def test_count_of_the_host_is_used_if_no_group_has_one(host):
    assert host("0::/\n", vmstat="nr_free_pages 1\noom_kill 77\n").count() == 77


def test_count_is_zero_without_any_counter(tmp_path: Path):
    nowhere = tmp_path / "nowhere"
    assert OomKills(nowhere, nowhere, nowhere).count() == 0


@pytest.mark.parametrize(
    ("exitcode", "is_oom", "rss_bytes", "cause", "reason"),
    [
        (3, True, 1, "exit", "exit code 3"),
        (-signal.SIGSEGV, True, 1 << 30, "signal", "SIGSEGV"),
        (
            -signal.SIGKILL,
            True,
            (1 << 30) * 6 // 5,
            "memory",
            "SIGKILL, likely out of memory (last RSS 1.2 GiB)",
        ),
        (
            -signal.SIGKILL,
            False,
            300 << 20,
            "signal",
            "SIGKILL from outside, or by the kernel for memory (last RSS 300 MiB)",
        ),
        (-signal.SIGKILL, True, 0, "memory", "SIGKILL, likely out of memory"),
        (-99, False, 0, "signal", "signal 99"),
    ],
)
def test_end_of_a_process_is_described(
    exitcode: int, is_oom: bool, rss_bytes: int, cause, reason: str
):
    assert describe_exit(exitcode, is_oom=is_oom, rss_bytes=rss_bytes) == (cause, reason)
