"""Imports for the forkserver: every worker that it forks has these modules in memory already.

CUDA stays untouched, since a context does not survive a fork.
"""

import os

import torch

import inferpool.workers.inside.process
from inferpool.models.attached import attached

attached("start check")  # the first worker of each model needs it
torch.set_num_threads(1)  # no thread pool may exist at the fork
# Else two threads that first use torch's pool at once may abort the process (ParallelOpenMP.cpp).
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
