"""Imported once by the forkserver, before it forks: what every worker needs, already in memory.

CUDA is left untouched: a context does not survive a fork.
"""

import torch

import inferpool.models.base
import inferpool.models.sources.echo
import inferpool.models.sources.registry
import inferpool.models.vision.efficientnet
import inferpool.workers.inside.process

torch.set_num_threads(1)  # no pool of threads may exist when it forks
