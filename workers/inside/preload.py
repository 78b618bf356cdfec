"""Imports for the forkserver: every worker that it forks has these modules in memory already.

CUDA stays untouched, since a context does not survive a fork.
"""

import torch

import inferpool.models.base
import inferpool.models.files.checkpoint
import inferpool.models.sources.classes
import inferpool.models.sources.echo
import inferpool.models.sources.registry
import inferpool.models.vision.efficientnet
import inferpool.workers.inside.process

torch.set_num_threads(1)  # no thread pool may exist at the fork
