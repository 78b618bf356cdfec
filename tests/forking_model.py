"""A model whose code starts processes of its own, and leaves them running."""

import os
import subprocess
import time
from pathlib import Path

from torch.utils.data import DataLoader

from inferpool.models.spec import Placement
from tests.fault_model import FaultModel


class ForkingModel(FaultModel):
    """Answers as `FaultModel`."""

    def __init__(self, *, children: str, **options: object) -> None:
        """Take where to tell of the processes.

        Args:
            children: A file: their numbers, of the last incarnation.
            options: See `FaultModel`.
        """
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._children = Path(children)

    def load(self, placement: Placement) -> None:
        super().load(placement)
        numbers = DataLoader(list(range(6)), batch_size=2, num_workers=1)
        assert [each.tolist() for each in numbers] == [[0, 1], [2, 3], [4, 5]]
        forked = os.fork()
        if forked == 0:
            time.sleep(600)
            os._exit(0)
        shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
        assert shell.stdout is not None
        pids = [forked, shell.pid, int(shell.stdout.readline())]
        self._children.write_text(" ".join(map(str, pids)))
