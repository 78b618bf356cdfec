"""A process that makes, computes and deletes jobs, and says so after each step: `FOLDER [FAULT]`.

It waits for a line of its input after each one. With a fault, it forgets to make something last,
which whoever looks for such mistakes must notice.
"""

import os
import sys
from pathlib import Path

from inferpool.service.parts.jobs.store import files
from inferpool.service.parts.jobs.store.store import JobStore
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import NOW, add, compute, take, values

STEPS = ("make a small job", "make a large one", "compute some", "compute all", "delete one")
NUM = 12
LARGE = 200_000
ANSWERS = [2 * number for number in range(NUM)]


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


def check(folder: Path, num_steps: int) -> None:
    """Check that a store has kept what so many steps have done."""
    store = JobStore.open(str(folder), LIMITS)
    done = STEPS[:num_steps]
    for id, made in (("small", STEPS[0]), ("large", STEPS[1])):
        job = store.job(id)
        if made not in done or (id == "small" and STEPS[4] in done):
            continue
        assert job is not None, id
        assert job.num_done > 0 or STEPS[2] not in done, id
        assert job.is_over or STEPS[3] not in done, id
    if STEPS[4] in done:
        assert store.job("small") is None
    finish(store, 9)
    for job in store.jobs(limit=9):
        assert values(store, job.id) == ANSWERS
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
