"""Opens the store of jobs, and says whether it can be used. In the event loop.

It is opened in a thread, since its library takes a moment to import and the database may be down.
Each second it is checked, so that calls are refused at once while its folder is gone, its disk does
not answer, another program keeps it locked, or its server is away. It comes back by itself.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.api.routes.health import JobStoreHealth, JobStoreState
from inferpool.service.client.urls import without_password
from inferpool.service.errors import ServiceError, StartError, StoreFullError, UnavailableError
from inferpool.service.parts.jobs.records import StoreLimits
from inferpool.service.parts.jobs.store.folder import HeldFolder
from inferpool.service.parts.jobs.threads import in_thread

if TYPE_CHECKING:
    from inferpool.service.parts.jobs.store.store import JobStore

logger = logging.getLogger(__name__)

_OPEN_S = 10.0
"""How long a call waits for the store to open for the first time."""
_RETRY_S = 10.0
_RETRY_AFTER_S = 5


class StoreKeeper:
    """The store of one service, from start to stop."""

    def __init__(
        self, place: str, limits: StoreLimits, *, check_s: float = 1.0, hang_s: float = 5.0
    ) -> None:
        """Open nothing yet.

        Args:
            place: A folder, or the URL of a PostgreSQL database.
            limits: Limits of the store.
            check_s: How often it is checked.
            hang_s: A check that takes longer says that it does not answer.
        """
        self.place = place
        self.limits = limits
        self._check_s = check_s
        self._hang_s = hang_s
        self._store: JobStore | None = None
        self._state: JobStoreState = "opening"
        self._reason = "the store of jobs (job_store) is being opened"
        """Why it cannot be used, for clients: without its place."""
        self._details = ""
        """The same with its place, for operators."""
        self._settled = asyncio.Event()
        """It is known whether the store can be used."""
        # A check of a disk that is gone may never end, and nothing else must wait for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="check the store of jobs")
        self._held: HeldFolder | None = None

    def hold(self) -> None:
        """Lock the folder against other services, from now until `close`.

        Raises:
            StartError: Another service uses it.
        """
        if "://" not in self.place:
            with contextlib.suppress(OSError):  # opening it says what is wrong
                self._held = HeldFolder(Path(self.place))

    @property
    def is_open(self) -> bool:
        """The store can be used, so that jobs are served."""
        return self._state == "open"

    def health(self) -> JobStoreHealth:
        """Return what operators are shown."""
        place = self.place
        if "://" in place:
            place = without_password(place)
        reason = "" if self.is_open else self._details or self._reason
        return JobStoreHealth(state=self._state, place=place, reason=reason)

    async def store(self) -> "JobStore":
        """Return the store. While it is opened for the first time, a call waits a moment.

        Raises:
            UnavailableError: It cannot be used; it says why.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPEN_S):
                await self._settled.wait()
        if self._store is None or self._state != "open":
            raise UnavailableError(
                f"jobs are not served at the moment: {self._reason}", retry_after_s=_RETRY_AFTER_S
            )
        return self._store

    async def run(self, use: Callable[["JobStore"], Awaitable[None]]) -> None:
        """Open the store, again if it is lost, until cancelled; `use` runs while it is open."""
        former: JobStore | None = None
        while True:
            store = await self._open(former)
            self._note("open")
            using = asyncio.ensure_future(use(store))
            try:
                await self._check_until_gone(store)
            finally:
                using.cancel()
                await asyncio.gather(using, return_exceptions=True)
            self._store, former = None, store
            await in_thread(store.close)

    async def close(self) -> None:
        """Close the store: other calls are over."""
        store, self._store = self._store, None
        self._note("closed", "this server is shutting down")
        if store is not None:
            await in_thread(store.close)
        elif self._held is not None:
            self._held.close()
        self._thread.shutdown(wait=False)

    async def _open(self, former: "JobStore | None") -> "JobStore":
        """Open the store; if it was gone, wait until it is there again."""
        while True:
            try:
                if former is None or await in_thread(lambda: former.may_be_opened):
                    return await in_thread(self._open_once)
            except StartError as error:
                # Where it is and what is wrong with it is not for clients.
                reason = "the store of jobs (job_store) cannot be opened; the log says why"
                self._note("failing" if former is None else "gone", reason, str(error))
            except Exception:
                logger.exception("the store of jobs cannot be opened")
                self._note("failing", "the store of jobs (job_store) cannot be opened")
            await asyncio.sleep(_RETRY_S if former is None else self._check_s)

    def _open_once(self) -> "JobStore":
        from inferpool.service.parts.jobs.store.store import (
            JobStore,  # imports SQLAlchemy, in a thread
        )

        held, self._held = self._held, None
        self._store = store = JobStore.open(self.place, self.limits, held)
        return store  # if the service stops meanwhile, nobody takes this, but `close` closes it

    async def _check_until_gone(self, store: "JobStore") -> None:
        from inferpool.service.parts.jobs.store.database import (
            StoreGoneError,  # it is imported by now
        )

        while True:
            checking = asyncio.ensure_future(in_thread(store.check, threads=self._thread))
            try:
                done, _ = await asyncio.wait([checking], timeout=self._hang_s)
                if not done:
                    self._note("failing", "the store of jobs (job_store) does not answer")
                await checking
            except StoreGoneError as error:
                self._note("gone", error.message)
                return
            except StoreFullError:
                self._note("open")  # jobs can be read and deleted
            except ServiceError as error:
                details = str(error.__cause__ or "").partition("\n")[0]
                self._note("failing", error.message, details)
            except Exception as error:
                logger.exception("the store of jobs cannot be checked")
                reason = "the store of jobs (job_store) cannot be checked; the log says why"
                self._note("failing", reason, str(error))
            else:
                self._note("open")
            finally:
                checking.cancel()
                await asyncio.wait([checking], timeout=self._hang_s)
            await asyncio.sleep(self._check_s)

    def _note(self, state: JobStoreState, reason: str = "", details: str = "") -> None:
        """Record whether the store can be used, and log it once."""
        self._settled.set()
        if (state, reason, details) == (self._state, self._reason, self._details):
            return
        if state == "open" and self._state != "opening":
            logger.info("jobs are served again: the store of jobs is there")
        elif reason and state != "closed":
            logger.error("jobs are not served: %s (%s)", details or reason, self.health().place)
        self._state, self._reason, self._details = state, reason, details
