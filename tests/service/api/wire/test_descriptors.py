import subprocess
import sys

from inferpool.service.api.wire.descriptors import (
    MAX_AUTO_CONNECTIONS,
    MIN_CONNECTIONS,
    max_connections,
)


def test_workers_keep_their_share_and_there_are_always_some_connections_and_never_too_many():
    assert max_connections(1024, 2) < 1024 - 64 - 2 * 6
    assert max_connections(1024, 10) < max_connections(1024, 2)

    assert max_connections(10, 4) == MIN_CONNECTIONS
    assert max_connections(1 << 20, 4) == MAX_AUTO_CONNECTIONS


def test_the_soft_limit_is_raised_to_the_hard_one():
    script = (
        "import resource, inferpool.service.api.wire.descriptors as d;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200));"
        "assert d.raise_limit() == 200;"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
