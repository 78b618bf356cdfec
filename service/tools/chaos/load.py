"""Clients that ask numbered questions, repeat refused ones, and check each answer."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.chaos.protocols import ChaosConnection, Open
from inferpool.service.tools.chaos.questions import Question, is_refusal, problem_code
from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    TrialAnswer,
    connect,
)
from inferpool.service.tools.trial.tally import LatencyHistogram

_PAUSE_S = 0.05
_MAX_EXAMPLES = 20
SLACK_S = 0.5
"""How long after its deadline an answer may arrive here, on a busy machine."""
PATIENCE_S = 5.0
"""How long after its deadline a request counts as lost."""


@dataclass(slots=True)
class ChaosTally:
    """Counts of the numbered requests. Only the event loop writes to it."""

    num_sent: int = 0
    """Numbers that were asked, each counted once even if it was refused several times."""
    num_instances_sent: int = 0
    num_instances_right: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    duplicated: int = 0
    expired: int = 0
    """Requests answered with 504: their deadline passed first."""
    late: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    """Refused attempts, by status; the same number was asked again."""
    broken: int = 0
    """Attempts whose streams said that they broke off, after right parts in their order; the same
    number was asked again."""
    examples: list[str] = field(default_factory=list)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Latencies of right answers, from the first attempt."""

    def note(self, text: str) -> None:
        """Store an example of a problem, unless there are many."""
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(text)

    def note_stray(self) -> None:
        """Count an answer without a question, or a second answer to one."""
        self.duplicated += 1
        self.note("an answer came that nobody had asked for")

    @property
    def num_settled(self) -> int:
        """Numbers that have ended."""
        return self.right + self.wrong + self.lost + self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedLoad:
    """Clients in a closed loop: each asks its next question when it has its answer."""

    address: Address
    questions: Sequence[Question]
    tally: ChaosTally
    timeout_s: float
    is_over: Callable[[], bool]
    patience_s: float = PATIENCE_S
    key: str = ""
    """API key of the clients; empty for none."""
    open: Open = connect

    async def run(self, numbers: Iterator[int], num_clients: int) -> None:
        """Ask the numbers with several clients, until the run is over."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._be_client(numbers))

    async def _be_client(self, numbers: Iterator[int]) -> None:
        connection: ChaosConnection | None = None
        try:
            while not self.is_over():
                number = next(numbers)
                self.tally.num_sent += 1
                connection = await self._settle(number, connection)
        finally:
            if connection is not None:
                connection.close()

    async def _settle(
        self, number: int, connection: ChaosConnection | None
    ) -> ChaosConnection | None:
        """Ask until an answer comes or none can come; return the connection to go on with.

        A refused request was never accepted, so it is asked again.
        """
        tally = self.tally
        question = self.questions[number % len(self.questions)]
        request = question.request(number, key=self.key)
        began = time.monotonic()
        while True:
            if connection is None or not connection.is_open:
                connection = await self.open(self.address, self.tally.note_stray)
            tally.num_instances_sent += question.num_instances
            asked = time.monotonic()
            try:
                patience_s = self.timeout_s + self.patience_s
                answer = await connection.ask(request, patience_s, b"%d" % number)
            except NoAnswerError as error:
                tally.lost += 1
                tally.note(f"request {number} is lost: {error}")
                connection.close()
                return None
            now = time.monotonic()
            if now - asked > self.timeout_s + SLACK_S:
                tally.late += 1
            if question.broke_off_rightly(answer.body):
                tally.broken += 1
                continue
            if not is_refusal(answer.status, answer.body):
                break
            tally.refused[answer.status] += 1
            await asyncio.sleep(_PAUSE_S)
        self._judge(number, question, answer, now - began)
        return connection

    def _judge(
        self, number: int, question: Question, answer: TrialAnswer, latency_s: float
    ) -> None:
        tally = self.tally
        if answer.status == 200 and answer.request_id == b"%d" % number:
            complaint = question.complaint(number, answer.body)
            if not complaint:
                tally.right += 1
                tally.num_instances_right += question.num_instances
                tally.latency.record(latency_s)
                return
        elif answer.status == 504:
            tally.expired += 1
            return
        elif answer.request_id != b"%d" % number:
            complaint = f"its X-Request-ID is {answer.request_id!r}"
        else:
            complaint = f"{answer.status} {problem_code(answer.body)} {answer.body[:200]!r}"
        tally.wrong += 1
        tally.note(f"request {number} is wrong: {complaint}")
