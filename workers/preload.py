"""Imported once by the forkserver, before it forks: what every worker needs, already in memory.

CUDA is left untouched: a context does not survive a fork.
"""

import gc
import os
import signal

import torch

from workers.guard import die_with_parent

FORKSERVER_PID = os.getpid()

die_with_parent(os.getppid())
# A stop of the whole process group or cgroup reaches the forkserver too; the front end drains first
# and then lets it go by closing its pipe.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.set_num_threads(1)  # no pool of threads may exist when it forks
gc.collect()
gc.freeze()  # so that no collection in a worker touches, and thereby copies, the shared pages
