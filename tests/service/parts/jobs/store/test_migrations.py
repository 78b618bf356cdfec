"""Stores of earlier versions are brought up to date, and those of later ones refused."""

import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from inferpool.service.errors import StartError
from inferpool.service.parts.jobs.store import database
from inferpool.service.parts.jobs.store.store import JobStore
from inferpool.service.parts.jobs.store.tables import tables
from tests.service.parts.jobs.conftest import LIMITS, drop_tables
from tests.service.parts.jobs.stores import NOW, add, finish, values

NEXT = '''"""Add a column."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{former}"


def upgrade():
    op.add_column("jobs", sa.Column("mood", sa.Text))
'''


def test_migrations_make_the_tables_that_the_store_uses(store: JobStore) -> None:
    with store._database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "inferpool_schema"})
        assert compare_metadata(context, tables) == []


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """Migrations with one more than there are."""
    folder = tmp_path / "migrations"
    shutil.copytree(database._MIGRATIONS, folder)
    former = max(file.name for file in folder.glob("versions/*.py"))[:4]
    (folder / "versions" / "9999_next.py").write_text(NEXT.format(former=former))
    return folder


def test_an_earlier_store_is_migrated_with_its_jobs_and_a_later_one_refused(
    place: str, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore.open(place, LIMITS)
    add(store, 100)
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(database, "_MIGRATIONS", later)
        store = JobStore.open(place, LIMITS)
        with store._database.reading() as connection:
            columns = {column["name"] for column in inspect(connection).get_columns("jobs")}
        assert "mood" in columns
        finish(store)
        store.close()
    with pytest.raises(StartError, match="was written by a later version of inferpool"):
        JobStore.open(place, LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(database, "_MIGRATIONS", later)
        store = JobStore.open(place, LIMITS)
        assert values(store) == [2 * number for number in range(100)]
        store.close()


def test_a_migration_that_fails_changes_nothing(
    place: str, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore.open(place, LIMITS)
    add(store)
    store.close()
    (script,) = later.glob("versions/9999*")
    script.write_text(script.read_text() + '    op.execute("SELECT * FROM nowhere")\n')
    with monkeypatch.context() as patch:
        patch.setattr(database, "_MIGRATIONS", later)
        with pytest.raises(StartError, match="nowhere"):
            JobStore.open(place, LIMITS)
    store = JobStore.open(place, LIMITS)
    with store._database.reading() as connection:
        columns = {column["name"] for column in inspect(connection).get_columns("jobs")}
    assert "mood" not in columns
    finish(store)
    assert values(store) == [0, 2, 4]
    store.close()


def test_services_of_both_versions_lose_no_job_of_one_database(postgres_url: str) -> None:
    store = JobStore.open(postgres_url, LIMITS)
    try:
        for id, owner in (("a", "ann"), ("b", "ben"), ("c", "ann")):
            add(store, id=id, owner=owner, webhook="http://x.example/")
        with store._database.writing() as connection:  # as version 0001 accepts jobs
            kept = connection.execute(text("SELECT id FROM jobs")).scalars().all()
            for id, name in (("a", "a"), ("b", "b"), ("a-too", "c")):
                connection.execute(
                    text(
                        "UPDATE jobs SET id = :id, name = NULL, receiver = NULL, leased_at = 0"
                        " WHERE name = :name"
                    ),
                    {"id": id, "name": name},
                )
        add(store, id="a-too", owner="ann")  # the id was free here
        assert None not in kept  # it deletes jobs without an id
        assert store.clean(NOW) == 0
        hers = {job.id for job in store.jobs(owner="ann", limit=9)}
        assert (len(hers), hers > {"a", "a-too"}) == (3, True)
        assert [job.id for job in store.jobs(owner="ben", limit=9)] == ["b"]
        finish(store)
        assert len(store.waiting_webhooks(9, NOW, ["ben"])) == 2
    finally:
        store.close()
        drop_tables(postgres_url)
