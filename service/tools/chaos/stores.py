"""Deletes the job store's folder while jobs run, and checks that jobs can be made again."""

import asyncio
import itertools
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from inferpool.service.tools.chaos.questions import Question
from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    TrialAnswer,
    connected,
)

_NUM_JOBS = 8
_BACK_S = 60.0
"""How long the service may take to open the store again once there is a folder."""
_OVER_S = 60.0
_RETRY_S = 0.2
_FIRST = 2 * 10**12
_COMPUTED = 2
"""How often an instance of a job may be computed: its result may be lost with the store."""


@dataclass(slots=True, kw_only=True)
class StoreFaults:
    """Deletes the job store of a service. Lives in the event loop."""

    address: Address
    folder: Path | None
    """Folder of the store; None if the service keeps no jobs."""
    questions: Sequence[Question]
    key: str = ""
    back_s: float = _BACK_S
    failed: list[str] = field(default_factory=list)
    """Problems that break the promise."""
    most_computed: int = 0
    """Instances of jobs that the service may have computed, at most."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST))

    async def lose(self) -> None:
        """Delete the folder, make it again once the service has noticed, and run a job."""
        assert self.folder is not None
        try:
            for _ in range(_NUM_JOBS):
                await self.submit()
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
            await self.compute(await self._until_back(self.folder))
        except (OSError, NoAnswerError) as error:
            self.failed.append(f"a job had no answer: {error}")

    async def compute(self, made: TrialAnswer | None = None) -> None:
        """Check that a job is computed: the given one, or a new one.

        Raises:
            OSError: The service cannot be reached.
            NoAnswerError: There is no answer.
        """
        made = made or await self.submit()
        if made.status != 202:
            return  # it is reported already
        id = msgspec.json.decode(made.body)["id"]
        answer = await self._ask(f"GET /jobs/{id}?wait={_OVER_S:g} HTTP/1.1\r\nHost: x\r\n")
        if answer.status != 200 or msgspec.json.decode(answer.body)["state"] != "succeeded":
            self.failed.append(f"job {id} was not computed: {answer.status} {answer.body[:200]!r}")

    async def _until_back(self, folder: Path) -> TrialAnswer:
        """Return the answer to the first job made after the folder was deleted."""
        until = time.monotonic() + self.back_s
        while True:
            answer = await self.submit()
            if answer.status == 202:
                if await asyncio.to_thread(_is_empty, folder):
                    self.failed.append("a job was accepted though the folder of its store is gone")
                return answer
            text = f"{answer.status} {answer.body[:200]!r}"
            if answer.status != 503 or b"store" not in answer.body:
                self.failed.append(f"without its store, a job should get 503 that says so: {text}")
                return answer
            if time.monotonic() > until:
                self.failed.append(f"the job store is not back after {self.back_s:g} s: {text}")
                return answer
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
            await asyncio.sleep(_RETRY_S)

    async def submit(self) -> TrialAnswer:
        """Submit a job of one question.

        Raises:
            OSError: The service cannot be reached.
            NoAnswerError: There is no answer.
        """
        number = next(self._numbers)
        question = self.questions[number % len(self.questions)]
        self.most_computed += _COMPUTED * question.num_instances
        request = question.request(number, key=self.key)
        job = re.sub(rb"^POST /predict/(\S+) ", rb"POST /jobs?model=\1 ", request, count=1)
        async with connected(self.address) as connection:
            return await connection.ask(job, _OVER_S)

    async def _ask(self, head: str) -> TrialAnswer:
        key = f"X-API-Key: {self.key}\r\n" if self.key else ""
        async with connected(self.address) as connection:
            return await connection.ask(f"{head}{key}\r\n".encode("latin-1"), 2 * _OVER_S)


def _is_empty(folder: Path) -> bool:
    return not any(folder.glob("*"))
