"""Stores of earlier versions are brought up to date, and those of later ones refused."""

import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from inferpool.service.errors import StartError
from inferpool.service.parts.jobs.store import database
from inferpool.service.parts.jobs.store.store import JobStore
from inferpool.service.parts.jobs.store.tables import tables
from tests.service.parts.jobs.conftest import LIMITS
from tests.service.parts.jobs.stores import add, finish, values

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
