"""Opens the database of jobs: SQLite in a folder, or PostgreSQL by URL."""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    cast,
    create_engine,
    event,
    extract,
    func,
    literal,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry

from inferpool.models.files.writing import sync_folder
from inferpool.service.errors import (
    OverShareError,
    StartError,
    StoreFullError,
    UnavailableError,
)
from inferpool.service.parts.jobs.store.folder import FileOnDisk, HeldFolder
from inferpool.service.queue.shares import allowance

logger = logging.getLogger(__name__)

_FILE = "jobs.sqlite3"
_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_S = 30.0
"""How long a transaction of SQLite waits for another one of this service."""
_LOCKED_S = 2.0
"""How long the first one waits for another program. Those behind it fail at once."""
_CONNECT_S = 5
_POSTGRESQL = {
    "connect_timeout": _CONNECT_S,
    # A network that drops everything must not keep a call for ever, nor a lock of a host that died.
    "tcp_user_timeout": 20_000,
    "options": "-c statement_timeout=60s -c idle_in_transaction_session_timeout=60s",
}
_RESERVE_BYTES = 16 * 2**20
"""Room that new jobs leave for results, unless the disk is small."""
_RESERVE_SHARE = 0.05
_RESULTS_SHARE = 0.25
"""The part of that room which results leave: a full SQLite needs some to delete anything."""
_PAGE_BYTES = 4096
_INCREMENTAL = 2
"""SQLite's number of this mode of auto_vacuum."""
_MOVED_PAGES = 256
"""Pages that SQLite gives back at once."""
_MIGRATION_LOCK = 7_267_301_945
"""A number that services agree on, so that one alone changes the tables of PostgreSQL."""
_LOCKS = 1_267_301_945 << 32
"""The first of the numbers that stand for names."""
_DISK_FULL = "53100"
"""PostgreSQL's code of a full disk (its manual, appendix A)."""
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FULL_NAMES = ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")
"""SQLite's names of the same; the second one comes with a new connection."""


GONE = "the store of jobs (job_store) is gone: its folder was removed or replaced, or its disk"
SILENT = "the store of jobs (job_store) does not answer"
LOCKED = "the store of jobs (job_store) is locked by another program"
_BEGIN = "BEGIN IMMEDIATE"


class StoreGoneError(UnavailableError):
    """The folder of the store is not where it was, so that what is written to it is lost."""


class Database:
    """Connections to one database, and transactions on it. May be used by any thread."""

    def __init__(self, place: str, held: HeldFolder | None = None) -> None:
        """Open the database, and bring its tables up to date.

        Args:
            place: A folder, which is made if it is not there, or a URL `postgresql://…`.
            held: The folder, if it is held already; `close` releases it.

        Raises:
            StartError: It cannot be used; the message says why.
        """
        self.folder = None if "://" in place else Path(place)
        """The folder of SQLite; None for PostgreSQL."""
        self._name = place if self.folder is None else str(self.folder)
        self._held = held
        self.file: FileOnDisk | None = None
        """The file of SQLite."""
        self._is_locked = False
        """Another program keeps SQLite from writing."""
        self._is_closed = False
        self._writing = threading.Lock()
        """Held by the one transaction of SQLite that may write. Its own lock has no line: whoever
        finds it taken sleeps for up to 0.1 s and tries again."""
        try:
            if self.folder is None:
                self._engine = _postgresql(place)
            else:
                self._held = held or HeldFolder(self.folder)
                self._engine = _sqlite(self.folder / _FILE, self._note_lock)
                self.file = FileOnDisk(self.folder / _FILE)
            event.listen(self._engine, "checkin", self._close_last)
            self._migrate()
        except (ArgumentError, SQLAlchemyError, OSError) as error:
            self.close()
            raise StartError(f"the store of jobs {self._name}: {_reason(error)}") from error
        except StartError:
            self.close()
            raise

    @property
    def clock(self) -> ColumnElement[float]:
        """The time for leases, in seconds of a clock that never jumps.

        Services on several hosts use the clock of their database. A store in a folder uses
        CLOCK_MONOTONIC, and keeps no lease over a restart.
        """
        if self.folder is None:
            return cast(extract("epoch", func.clock_timestamp()), Double)
        return literal(time.monotonic(), Double)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yield a connection in a transaction, which is durable when this returns.

        Raises:
            StoreFullError: The database has no room; nothing was changed.
            UnavailableError: The database does not answer. If that was during the commit, it is
                unknown whether anything was changed.
        """
        with self._turn():
            self.check_file()
            if self._is_locked:
                raise UnavailableError(LOCKED, retry_after_s=5)
            with told(), self._engine.begin() as connection:
                yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that sees one state of the database, and changes nothing.

        Raises:
            UnavailableError: The database does not answer.
        """
        self.check_file()
        with (
            told(),
            self._engine.connect().execution_options(begin="BEGIN") as connection,
            connection.begin(),
        ):
            yield connection

    def check(self) -> None:
        """Check that it can be used; a transaction of this service may be under way.

        Raises:
            StoreGoneError: What is written to it is lost, for its folder is gone or another one.
            UnavailableError: It does not answer, or another program keeps it.
        """
        if self.folder is None:
            with told(SILENT), self._engine.connect() as connection:
                connection.execute(text("SELECT 1"))
            return
        assert self._held is not None
        self.check_file()
        if not self._held.is_there:
            raise StoreGoneError(GONE, retry_after_s=5)
        if self._writing.acquire(blocking=False):
            try:
                with told(SILENT), self._engine.begin():
                    pass
            except UnavailableError as error:
                if not self._is_locked:
                    raise
                raise UnavailableError(LOCKED, retry_after_s=5) from error.__cause__
            finally:
                self._writing.release()
        elif self._is_locked:
            raise UnavailableError(LOCKED, retry_after_s=5)

    def check_file(self) -> None:
        """Check that SQLite's file is where it was: what is beside it is lost only if it is.

        Raises:
            StoreGoneError: It is not.
        """
        if self._is_closed or (self.file is not None and not self.file.is_there):
            raise StoreGoneError(GONE, retry_after_s=5)

    def _note_lock(self, is_locked: bool) -> None:
        self._is_locked = is_locked

    def lock(self, connection: Connection, name: str) -> None:
        """Lock a name until this transaction ends; others that lock it wait."""
        if self.folder is None:  # SQLite has one that writes at a time
            _lock(connection, _LOCKS + crc32(name.encode()))

    def check_share(self, used: int, num_bytes: int, share: float) -> None:
        """Refuse what would give an owner more than its share of the disk.

        Args:
            used: The bytes that it has.
            num_bytes: Those that it wants to write.
            share: The part of what others leave that it may have.

        Raises:
            OverShareError: It would have more.
        """
        if self.folder is None or not used:
            return
        room, reserve = self._room()
        if num_bytes > allowance(used, max(0, room - reserve), share):
            raise OverShareError(
                f"the jobs of this key have its share of the disk (per_key_share = {share:g} of "
                "what others leave); delete some that are over",
                retry_after_s=10,
            )

    def check_room(
        self, num_bytes: int, inside: Connection | None = None, *, for_result: bool = False
    ) -> None:
        """Refuse what would fill the disk, so that results of accepted jobs have room.

        Args:
            num_bytes: The bytes to write.
            inside: A transaction that will write them to the database; None: they go to files.
            for_result: They are of a result.

        Raises:
            StoreFullError: There is too little room.
        """
        if self.folder is None:
            return  # the disk is the database's
        room, reserve = self._room()
        reserve = int(reserve * _RESULTS_SHARE) if for_result else reserve
        if inside is not None:
            room -= self._num_bytes_to_come(inside)
        if room - num_bytes < reserve and inside is not None:
            room += _num_free(inside) * _PAGE_BYTES
        if room - num_bytes < reserve:
            raise StoreFullError(
                "the disk with the store of jobs is nearly full; delete jobs that are over, or try "
                "again later",
                retry_after_s=10,
            )

    def shrink(self) -> bool:
        """Return some free space of SQLite's file to the disk; return whether there is more.

        Raises:
            StoreFullError: There is no room to do it.
            UnavailableError: The database does not answer.
        """
        if self.folder is None:
            return False
        with self.writing() as connection:
            _, kept = self._room()
            num_left = _num_free(connection) - kept // _PAGE_BYTES
            for _ in range(min(num_left, _MOVED_PAGES)):  # the module runs one step of each
                connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
        if num_left > 0:  # the file itself shrinks when SQLite copies its journal to it
            with told(), self._engine.connect().execution_options(begin="") as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
        return num_left > _MOVED_PAGES

    def close(self) -> None:
        """Close all connections; one that is in use is closed after its transaction."""
        self._is_closed = True
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.dispose()
        if self._held is not None:
            self._held.close()

    def _num_bytes_to_come(self, connection: Connection) -> int:
        """Return by how much SQLite's file grows once its journal is copied to it."""
        assert self.folder is not None
        num_pages: int = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return max(0, num_pages * _PAGE_BYTES - (self.folder / _FILE).stat().st_size)

    def _close_last(self, _: object, record: ConnectionPoolEntry) -> None:
        """Close a connection that comes back late: the pool would keep it, and its files."""
        if self._is_closed:
            record.close()

    def _room(self) -> tuple[int, int]:
        """Return the free bytes of the disk, and how many of them new jobs leave."""
        disk = os.statvfs(self.folder or "/")
        reserve = min(_RESERVE_BYTES, int(disk.f_blocks * disk.f_frsize * _RESERVE_SHARE))
        return disk.f_bavail * disk.f_frsize, reserve

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        if not self._writing.acquire(timeout=_BUSY_S):
            raise UnavailableError("the store of jobs is busy", retry_after_s=5)
        try:
            yield
        finally:
            self._writing.release()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self._engine.begin() as connection:
            if self.folder is None:
                _lock(connection, _MIGRATION_LOCK)
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:  # its revision is none of ours
                raise StartError(
                    f"the store of jobs {self._name} was written by a later version of inferpool "
                    f"({error}); start that version, or name another store in job_store"
                ) from error


@contextlib.contextmanager
def told(message: str = "") -> Iterator[None]:
    """Turn errors of the database or the disk into errors for callers.

    Args:
        message: The text of the error; empty to refer to the log, and write to it.

    Raises:
        StoreFullError: There is no room.
        UnavailableError: Anything else; the log says what.
    """
    try:
        yield
    except IntegrityError:
        raise
    except (DBAPIError, PoolTimeoutError, OSError) as error:
        if _is_full(error):
            raise StoreFullError(
                "the store of jobs has no room left; delete jobs that are over, or try again later",
                retry_after_s=10,
            ) from error
        if not message:
            logger.warning("the store of jobs: %s", _reason(error))
            message = "the store of jobs cannot be used at the moment; the log says why"
        raise UnavailableError(message, retry_after_s=5) from error


def _num_free(connection: Connection) -> int:
    """Return the pages of SQLite's file that nothing uses."""
    return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())


def _lock(connection: Connection, number: int) -> None:
    """Wait until this transaction of PostgreSQL has a lock."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    if not isinstance(error, DBAPIError):
        return False
    if getattr(error.orig, "sqlstate", None) == _DISK_FULL:
        return True
    return getattr(error.orig, "sqlite_errorname", "") in _FULL_NAMES


def _sqlite(file: Path, note_lock: Callable[[bool], None]) -> Engine:
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    sync_folder(file.parent)
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": _LOCKED_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the module begins nothing by itself
        try:
            if connection.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # it waits for writers
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
        except Exception:
            connection.close()  # the pool does not know it yet
            raise

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that begins as a reader cannot always become a writer (lang_transaction).
        begin = connection.get_execution_options().get("begin", _BEGIN)
        if not begin:
            return
        try:
            connection.exec_driver_sql(begin)
        except DBAPIError as error:
            if getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                note_lock(True)
            raise
        if begin == _BEGIN:
            note_lock(False)

    return engine


def _postgresql(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "postgresql":
        raise StartError(
            f"job_store is a URL of {parsed.get_backend_name()!r}; write a folder or a URL that "
            "begins with postgresql://"
        )
    try:
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            connect_args={k: v for k, v in _POSTGRESQL.items() if k not in parsed.query},
            pool_pre_ping=True,  # a restart of the database costs no job
        )
    except ModuleNotFoundError as error:
        raise StartError(
            f"job_store is PostgreSQL, which needs a package that is missing ({error.name}); "
            "install inferpool[postgresql]"
        ) from error


def _reason(error: Exception) -> str:
    """Return the first line of what went wrong, without the statement."""
    if _is_full(error):
        return "its disk has no room left"
    origin = error.orig if isinstance(error, DBAPIError) else error
    return str(origin).strip().splitlines()[0] if str(origin).strip() else type(origin).__name__
