"""Imported first by the forkserver: from here on it lives as long as the front end, and no less."""

import os
import signal

from workers.guard import die_with_parent

FORKSERVER_PID = os.getpid()

os.environ.pop("PYTHONSAFEPATH", None)  # meant for this process, not for what a model may start

die_with_parent(os.getppid())
# A stop of the whole process group or cgroup reaches the forkserver too; the front end drains first
# and then lets it go by closing its pipe.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
