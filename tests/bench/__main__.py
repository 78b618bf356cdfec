"""The command `python -m tests.bench`: measures the service and its peers. See README.md.

Processes that it spawns import this module, so it imports the benchmarks only as a command.
"""

import signal
import sys
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:  # a second one would leave servers behind
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    from inferpool.workers.host.orphans import adopt_orphans
    from tests.bench.command import main

    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    adopt_orphans()
    sys.exit(main())
