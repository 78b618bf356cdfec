"""Runs the migrations over the connection that the store gives; Alembic calls it."""

from alembic import context

from inferpool.service.parts.jobs.store.tables import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables,
    version_table="inferpool_schema",
)
context.run_migrations()
