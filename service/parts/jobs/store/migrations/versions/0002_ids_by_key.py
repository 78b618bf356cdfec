"""Scopes the ids of jobs to their keys, and adds the receivers of webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Copy each id to a column that is unique by key. SQLite cannot remove a unique column."""
    op.add_column("jobs", sa.Column("name", sa.String(64)))
    op.add_column("jobs", sa.Column("receiver", sa.Text))
    op.execute("UPDATE jobs SET name = id")
    op.execute("UPDATE jobs SET receiver = owner WHERE webhook IS NOT NULL")
    op.drop_index("jobs_by_owner", "jobs")
    op.create_index("jobs_by_owner", "jobs", ["owner", "name", "num_bytes"])
    op.create_index("jobs_by_name", "jobs", ["owner", "name"], unique=True)
    op.create_index("jobs_by_receiver", "jobs", ["receiver", "webhook_due"])
