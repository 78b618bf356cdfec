"""Stores of jobs for tests: SQLite in a folder, and a PostgreSQL database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.store.store import JobStore
from tests.postgres import find_programs, postgres

LIMITS = StoreLimits(retention_s=100.0, max_jobs=50, max_bytes=2**26)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    if find_programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The place of a store that is empty."""
    if request.param == "sqlite":
        yield str(tmp_path / "jobs")
        return
    url: str = request.getfixturevalue("postgres_url")
    yield url
    drop_tables(url)


def drop_tables(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS parts, jobs, inferpool_schema")


@pytest.fixture
def store(place: str) -> Iterator[JobStore]:
    store = JobStore.open(place, LIMITS)
    yield store
    store.close()
