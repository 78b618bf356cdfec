"""A process that makes, computes and deletes jobs, and says so after each step: `FOLDER [FAULT]`.

It waits for a line of its input after each one. With a fault, it forgets to make something last,
which whoever looks for such mistakes must notice.
"""

import os
import sys

from inferpool.service.parts.jobs.store import files
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import NOW, add, compute, take

STEPS = ("make a small job", "make a large one", "compute some", "compute all", "delete one")
NUM = 12
LARGE = 200_000


def main(folder: str, fault: str = "") -> None:
    if fault == "files":
        os.fsync = forget
    if fault == "folders":
        files.sync_folder = forget
    store = JobStore.open(folder, LIMITS)
    for step in STEPS:
        {
            STEPS[0]: lambda: add(store, NUM, id="small"),
            STEPS[1]: lambda: add(store, NUM, id="large", num_bytes=LARGE),
            STEPS[2]: lambda: finish(store, 2),
            STEPS[3]: lambda: finish(store, 9),
            STEPS[4]: lambda: store.delete("small"),
        }[step]()
        sys.stdout.write(f"did {step}\n")
        sys.stdout.flush()
        sys.stdin.readline()
    store.close()


def forget(*_arguments: object, **_named: object) -> None:
    """Do nothing, in the place of a function that makes something last."""


def finish(store: JobStore, num_parts: int) -> None:
    """Compute parts; the answers of the large job are large."""
    for part in take(store, num_parts):
        num_bytes = LARGE if part.job.id == "large" else 0
        assert store.leases.commit_part(part, compute(part, num_bytes=num_bytes), NOW)


if __name__ == "__main__":
    main(*sys.argv[1:])
