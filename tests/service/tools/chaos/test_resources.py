import os
from pathlib import Path

from inferpool.service.tools.chaos.resources import holdings_of


def test_a_file_of_the_job_store_counts_only_if_it_stays_open_after_its_end(tmp_path: Path):
    def num() -> int:
        return holdings_of(os.getpid(), [], tmp_path).descriptors

    before = num()
    file = tmp_path / "jobs.sqlite3"
    with file.open("w"):
        assert num() == before
        file.unlink()
        assert num() == before + 1
    assert num() == before
