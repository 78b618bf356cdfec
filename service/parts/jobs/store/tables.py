"""The tables of the store, as the newest migration leaves them.

A job's row is written when its first parts are. It gets its `name` with the last ones, in the
transaction that accepts the job: a row without one is a job on its way, which nobody sees.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from inferpool.service.parts.jobs.records import UNFINISHED

_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up only an INTEGER."""

tables = MetaData()

jobs = Table(
    "jobs",
    tables,
    Column("number", _NUMBER, primary_key=True, autoincrement=True),
    Column("id", String(64), unique=True),
    Column("name", String(64)),
    Column("folder", String(32), nullable=False, unique=True),
    Column("owner", String(64), nullable=False),
    Column("idempotency_key", Text),
    Column("body_digest", String(64), nullable=False),
    Column("model", Text, nullable=False),
    Column("parameters", LargeBinary, nullable=False),
    Column("webhook", Text),
    Column("webhook_due", Double),
    Column("webhook_attempts", Integer, nullable=False, default=0),
    Column("priority", Integer, nullable=False),
    Column("trace", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("versions", Text, nullable=False, default=""),
    Column("num_instances", Integer, nullable=False, default=0),
    Column("num_done", Integer, nullable=False, default=0),
    Column("num_failed", Integer, nullable=False, default=0),
    Column("num_bytes", BigInteger, nullable=False, default=0),
    Column("num_parts_left", Integer, nullable=False, default=0),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("expires_at", Double),
    Column("leased_at", Double, nullable=False, default=0.0),
    Column("problem_code", Text),
    Column("problem_message", Text),
    Column("receiver", Text),
    UniqueConstraint("owner", "idempotency_key"),
    Index("jobs_by_state", "state", "model"),
    Index("jobs_by_owner", "owner", "name", "num_bytes"),
    Index("jobs_by_name", "owner", "name", unique=True),
    Index("jobs_by_receiver", "receiver", "webhook_due"),
    sqlite_autoincrement=True,
)
"""`folder` is the name of the folder with its files. Unlike `number`, which a transaction that is
undone gives back, it is never used again, so a writer knows its job by it. `name` is the id that
clients know, and is its key's own. `id` is not used any more: SQLite cannot remove a unique column.
`receiver` is who is called by the
webhook, and for whom. `leased_at` is when a part was leased last, and while a job is on its way,
when parts were written last."""

parts = Table(
    "parts",
    tables,
    Column("job", _NUMBER, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("first", Integer, nullable=False),
    Column("num_instances", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("payload", LargeBinary),
    Column("leased_until", Double),
    Column("token", String(32), index=True),
    Column("result", LargeBinary),
    Column("result_token", String(32)),
    Column("version", Integer, nullable=False, default=0),
    Index("parts_by_lease", "job", "leased_until"),
)
"""`leased_until` is 0 while nobody has the part, and NULL once it has a result. A payload or result
that is NULL is in a file. Leases count by `Database.clock`."""

is_accepted = jobs.c.name.is_not(None)
"""The job is there for others, whole."""
is_unfinished = is_accepted & jobs.c.state.in_(UNFINISHED)
