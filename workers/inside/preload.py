"""Imports for the forkserver: every worker that it forks has these modules in memory already.

CUDA stays untouched, since a context does not survive a fork.
"""

import torch

import inferpool.workers.inside.process
from inferpool.models.attached import attached

_SOURCES = ("efficientnet_lite0", "echo", "package.module:Class", "weights")
for _name in (*_SOURCES, "speed preset", "start check"):
    attached(_name)  # most workers need it
torch.set_num_threads(1)  # no thread pool may exist at the fork
