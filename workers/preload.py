"""Imported once by the forkserver, before it forks: what every worker needs, already in memory.

CUDA is left untouched: a context does not survive a fork.
"""

import torch

import models.base
import models.echo
import models.efficientnet
import models.registry
import workers.process

torch.set_num_threads(1)  # no pool of threads may exist when it forks
