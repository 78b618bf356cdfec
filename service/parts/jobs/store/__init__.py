"""The store of jobs: SQLAlchemy Core over SQLite in a folder, or over PostgreSQL."""
