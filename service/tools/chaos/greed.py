"""Clients with a key of their own that ask for far more than their share, for a while at a time."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.questions import Question
from inferpool.service.tools.trial.connection import Address

_MORE = 8
"""How many greedy clients there are for each client that counts."""
_GREEDY_S = 3.0
_FIRST = 10**12


@dataclass(slots=True, kw_only=True)
class Greed:
    """Asks with another key than the clients that are watched. Lives in the event loop."""

    address: Address
    questions: Sequence[Question]
    key: str
    """Empty if nobody is greedy."""
    num_clients: int
    """Clients that are watched."""
    timeout_s: float
    tally: ChaosTally = field(default_factory=ChaosTally)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST))

    async def ask(self) -> None:
        """Ask for a while, in many connections."""
        until = time.monotonic() + _GREEDY_S
        load = NumberedLoad(
            address=self.address,
            questions=self.questions,
            tally=self.tally,
            timeout_s=self.timeout_s,
            is_over=lambda: time.monotonic() > until,
            key=self.key,
        )
        try:
            await load.run(self._numbers, _MORE * self.num_clients)
        except* OSError as error:
            self.tally.lost += self.tally.num_sent - self.tally.num_settled
            self.tally.note(f"a greedy client has no connection: {error.exceptions[0]}")
