"""Creates the tables of jobs and their parts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "jobs",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), unique=True),
        sa.Column("folder", sa.String(32), nullable=False, unique=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("parameters", sa.LargeBinary, nullable=False),
        sa.Column("webhook", sa.Text),
        sa.Column("webhook_due", sa.Double),
        sa.Column("webhook_attempts", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("trace", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("versions", sa.Text, nullable=False),
        sa.Column("num_instances", sa.Integer, nullable=False),
        sa.Column("num_done", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_parts_left", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.Column("leased_at", sa.Double, nullable=False),
        sa.Column("problem_code", sa.Text),
        sa.Column("problem_message", sa.Text),
        sa.UniqueConstraint("owner", "idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state", "model"])
    op.create_index("jobs_by_owner", "jobs", ["owner", "id", "num_bytes"])
    op.create_table(
        "parts",
        sa.Column(
            "job", _NUMBER, sa.ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("num_instances", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary),
        sa.Column("leased_until", sa.Double),
        sa.Column("token", sa.String(32)),
        sa.Column("result", sa.LargeBinary),
        sa.Column("result_token", sa.String(32)),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_index("ix_parts_token", "parts", ["token"])
    op.create_index("parts_by_lease", "parts", ["job", "leased_until"])
